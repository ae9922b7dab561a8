package launch

import (
	"fmt"
	"io"
	"os/exec"
	"syscall"
)

// warden is a small shell that outlives a launcher which is killed, and then kills the process groups of its workers. The workers
// themselves die by the parent-death signal; this is for what they have started.
type warden struct {
	cmd *exec.Cmd
	in  io.WriteCloser
}

// The list of groups is empty when a launcher ends in good order. Numbers come and go while their leaders are not yet reaped, so none is of another process.
const wardenScript = `trap '' TERM INT HUP USR1 USR2 QUIT
all=
while read -r op pid; do
	case $op in
	+) all="$all $pid" ;;
	-) left=; for p in $all; do [ "$p" = "$pid" ] || left="$left $p"; done; all=$left ;;
	esac
done
for p in $all; do kill -9 "-$p" 2>/dev/null; done
`

// startWarden gives nil where there is no shell, as in the smallest containers: then only the workers themselves die with the launcher.
func startWarden() *warden {
	sh, err := exec.LookPath("sh")
	if err != nil {
		return nil
	}
	w := &warden{cmd: exec.Command(sh, "-c", wardenScript, "goddp-warden")}
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return nil
	}
	if err := w.cmd.Start(); err != nil {
		return nil
	}
	return w
}

func (w *warden) started(pid int) { w.tell("+", pid) }

// ended must be called before the process is reaped.
func (w *warden) ended(pid int) { w.tell("-", pid) }

func (w *warden) tell(op string, pid int) {
	if w != nil {
		fmt.Fprintf(w.in, "%s %d\n", op, pid) //nolint:errcheck // it was killed: nothing to be done
	}
}

func (w *warden) close() {
	if w != nil {
		w.in.Close()
		w.cmd.Wait() //nolint:errcheck
	}
}
