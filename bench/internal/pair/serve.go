package pair

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"
)

// Serve is the Go side's end: it says that it is ready and answers the requests on standard input until there are no
// more. Call it on the goroutine, and the thread, that has made what is measured.
func Serve(ready Answer, handle func(Request) (Answer, error)) error {
	return serve(os.Stdin, os.Stdout, ready, handle)
}

func serve(in io.Reader, out io.Writer, ready Answer, handle func(Request) (Answer, error)) error {
	say := func(r reply) error {
		line, err := json.Marshal(r)
		if err == nil {
			_, err = out.Write(append(line, '\n'))
		}
		return err
	}
	if err := say(reply{Values: ready}); err != nil {
		return err
	}
	stop, err := startProfile()
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var r Request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return fmt.Errorf("request %q: %w", lines.Text(), err)
		}
		answer, err := protect(func() (Answer, error) { return handle(r) })
		text := ""
		if err != nil {
			text = fmt.Sprintf("%s: %v", r.Do, err)
		}
		if err := say(reply{answer, text}); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return stop()
}

// protect turns a panic, which gotch's Must functions have for an error, into one.
func protect(f func() (Answer, error)) (a Answer, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	return f()
}

// Unknown is the error for a request that a side has no answer to.
func Unknown(r Request) error { return fmt.Errorf("there is no %q here", r.Do) }

// Measure runs work, which does n of something, and gives what one of them took: "seconds" and "cpu" (of all
// threads), "switches" (how often a thread of the process went to sleep), and of Go's own "cgo" (calls), "allocs",
// "bytes" (allocated) and "gc" (collections).
func Measure(n int, work func() error) (Answer, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cgo, cpu, sleeps := runtime.NumCgoCall(), ProcessorSeconds(), switches()
	begin := time.Now()
	err := work()
	took := time.Since(begin).Seconds()
	cgo, cpu, sleeps = runtime.NumCgoCall()-cgo, ProcessorSeconds()-cpu, switches()-sleeps
	runtime.ReadMemStats(&after)
	each := func(total float64) []float64 { return []float64{total / float64(n)} }
	return Answer{
		"seconds": each(took), "cpu": each(cpu), "switches": each(float64(sleeps)), "cgo": each(float64(cgo)),
		"allocs": each(float64(after.Mallocs - before.Mallocs)), "bytes": each(float64(after.TotalAlloc - before.TotalAlloc)),
		"gc": each(float64(after.NumGC - before.NumGC)),
	}, err
}

// ProcessorSeconds is the processor time that all threads of this process have used.
func ProcessorSeconds() float64 {
	u := usage()
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// PeakMemory is the most memory that this process has had in use, in bytes.
func PeakMemory() float64 { return float64(usage().Maxrss) * 1024 }

func switches() int64 { return usage().Nvcsw }

func usage() (u syscall.Rusage) {
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it cannot fail on the process itself
	}
	return u
}
