package rendezvous

import "time"

// Kind is what a [Message] is about.
type Kind string

// From a node to the coordinator.
const (
	Join      Kind = "join"
	Beat      Kind = "beat"      // still here
	Failing   Kind = "failing"   // a worker failed; the node's others are being stopped
	Failed    Kind = "failed"    // workers failed, and none is left
	Succeeded Kind = "succeeded" // all workers ended well
	Resume    Kind = "resume"    // workers saved and left before the end, to be started again another time
	Stopped   Kind = "stopped"   // as ordered: no worker of the round is left
	Leave     Kind = "leave"     // the node goes, in good order
	Preempt   Kind = "preempt"   // the node was told that the job will have to go: all are to save
)

// From the coordinator to a node.
const (
	Wait   Kind = "wait" // joined; Text says what for
	Start  Kind = "start"
	Stop   Kind = "stop"
	Finish Kind = "finish"
	Refuse Kind = "refuse"
	// Beat and Preempt are passed on.
)

// Message goes between a node and the coordinator.
type Message struct {
	Kind  Kind   `json:"kind"`
	Node  string `json:"node,omitempty"` // the sender's id
	Round int    `json:"round,omitempty"`
	Text  string `json:"text,omitempty"`

	Info     *Info     `json:"info,omitempty"`     // of Join
	Failures []Failure `json:"failures,omitempty"` // of Failing, Failed, Stopped: all so far
	Resumes  int       `json:"resumes,omitempty"`  // of Resume, Stopped: workers that saved and left
	Assign   *Assign   `json:"assign,omitempty"`   // of Start
	Outcome  *Outcome  `json:"outcome,omitempty"`  // of Finish
	Signal   string    `json:"signal,omitempty"`   // of Preempt, Leave
}

// Info is what a node says of itself.
type Info struct {
	Agent    string `json:"agent"` // the same through all joins of one launcher process
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	Workers  int    `json:"workers"`
	Role     string `json:"role"`
	NodeRank int    `json:"node_rank"` // -1: any
	Restarts int    `json:"restarts"`  // as far as it knows, from an earlier host
	Round    int    `json:"round"`     // likewise
	Min      int    `json:"min"`
	Max      int    `json:"max"`
}

// Assign is a node's part of a round.
type Assign struct {
	GroupRank, GroupSize int
	FirstRank, WorldSize int
	FirstRoleRank        int
	RoleSize             int
	MasterAddr           string // "": the address by which the node reaches the host
	MasterPort           int
	Restarts             int
}

// Class orders failures, the likelier root cause first.
type Class int

const (
	ByItself Class = iota
	Killed         // found killed by someone else
	Lost           // a node went away
	Peer           // complained that another worker went away
	Told           // failed after it was asked to end
)

// Failure is how a worker, or a node, failed.
type Failure struct {
	Class     Class     `json:"class"`
	Node      string    `json:"node,omitempty"` // set by the coordinator for a lost node
	Rank      int       `json:"rank"`
	LocalRank int       `json:"local_rank"`
	WorldSize int       `json:"world_size"`
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	ExitCode  int       `json:"exit_code"`
	Signal    string    `json:"signal,omitempty"`
	Message   string    `json:"message"`
	Stack     string    `json:"stack,omitempty"`
	Hint      string    `json:"hint,omitempty"`
	ErrorFile string    `json:"error_file,omitempty"`
	Time      time.Time `json:"time"`
	Panic     bool      `json:"panic,omitempty"`
}

// Result is how a job ended.
type Result string

const (
	ResultOK       Result = "ok"
	ResultFailed   Result = "failed"  // Failures[0] is the root cause
	ResultResume   Result = "resume"  // stopped before its end, state saved
	ResultStopped  Result = "stopped" // by a signal to the host, Signal
	ResultNoQuorum Result = "noquorum"
)

// Outcome is the end of a job, the same for all nodes.
type Outcome struct {
	Result   Result    `json:"result"`
	Text     string    `json:"text,omitempty"`
	Signal   string    `json:"signal,omitempty"`
	Restarts int       `json:"restarts"`
	Failures []Failure `json:"failures,omitempty"`
}
