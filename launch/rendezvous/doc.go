// Package rendezvous gathers the nodes of an elastic job and decides, for all of them, when the workers start, stop and start again.
//
// # Mental model
//
// One node is the host: it serves a store (package tcpstore) at the job's endpoint and runs the [Coordinator], which alone decides. Every node,
// the host too, is a [Node]: it puts messages (joined, still here, a worker failed, all succeeded, stopped, leaving) into the coordinator's
// queue in that store and takes orders (start, stop, finish) from its own. Nobody polls, and no clocks are compared: a node is dead when its
// connection ends, or when the coordinator has heard nothing from it for the keep-alive time; a node that has heard nothing from the
// coordinator for so long stops its workers by itself.
//
// A job goes through rounds. In a round the coordinator gathers nodes, at least Min; with Max of them, or when the last call is over, it has a
// fresh store made for the workers, gives out ranks and says start. A failed worker or a lost node ends the round: all stop, and unless the one
// counter of restarts is used up there is another round, among the nodes that are still there and those that have come. A node that joins
// while there is room ends the round too, without being counted. When all nodes have succeeded, or the counter is used up, every node is told how
// the job ended, and gives that as its own end.
//
// The coordinator is a plain state machine: events in, messages out, time as a parameter.
package rendezvous
