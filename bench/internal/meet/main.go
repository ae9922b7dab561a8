// Command meet is the worker that the benchmark of the launcher starts: the ranks meet at the store as those of a Gloo
// group do (each sets its address and reads those of all others) and end. It links no libtorch, so what is measured is
// the launcher and its store.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/launch/tcpstore"
)

func main() {
	if err := meet(); err != nil {
		fmt.Fprintln(os.Stderr, "meet:", err)
		os.Exit(1)
	}
}

func meet() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	env, ok, err := launch.FromEnv()
	if err != nil || !ok {
		return errors.Join(err, errors.New("no rank's environment"))
	}
	c, err := tcpstore.Dial(ctx, net.JoinHostPort(env.MasterAddr, strconv.Itoa(env.MasterPort)))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Set(ctx, fmt.Sprint("rank/", env.Rank), make([]byte, 64)); err != nil {
		return err
	}
	for i := range env.WorldSize {
		if _, err := c.Get(ctx, fmt.Sprint("rank/", i)); err != nil {
			return err
		}
	}
	return nil
}
