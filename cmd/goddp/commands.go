package main

// commands are the subcommands, in the order of the help; those of one group stand together.
var commands = []*command{
	setupCommand,
	envCommand,
	doctorCommand,
	runCommand,
}
