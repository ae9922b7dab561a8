// Package pair runs two or more implementations of the same work by turns and compares them.
//
// A side is an implementation: processes that wait for requests, one line of JSON each, and answer with numbers. Several
// processes of one side are the ranks of a job. While one side works the others wait for their next request, so whatever
// else the machine does, and however warm it is, falls on all of them. The order of the sides changes with every turn.
//
//	goSide, err := pair.Start(ctx, pair.Command{Name: "Go", Argv: []string{self, "-side", "add"}})
//	pySide, err := pair.Start(ctx, pair.Command{Name: "Python", Argv: []string{python, "add.py"}})
//	turns, err := pair.Plan{Rounds: 7, Warmup: 1}.Play(ctx, pair.Request{Do: "add", N: 1000}, goSide, pySide)
//	ratio := pair.Ratio(turns[0], turns[1], "seconds")
//
// The other end of the pipe is [Serve] in Go, and in Python the module that [PythonModule] holds.
package pair
