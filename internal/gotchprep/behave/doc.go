// Package behave holds the tests of the prepared gotch: each shows what one of gotchprep's rules is for, by what a program
// sees of it. They need the copy that gotchprep makes, and fail or end the process on the unmodified module.
package behave
