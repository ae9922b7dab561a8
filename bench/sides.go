package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
)

// runSide is a process of a Go side.
func runSide(ctx context.Context, name string) error {
	args := []byte(os.Getenv(argsVar))
	switch name {
	case "toy":
		return ranked(ctx, args, toySide)
	case "mnist":
		return ranked(ctx, args, mnistSide)
	case "resnet":
		if os.Getenv("RANK") == "" {
			return alone(ctx, args, resnetSide)
		}
		return ranked(ctx, args, resnetSide)
	case "layer":
		return ranked(ctx, args, layerSide)
	case "allreduce":
		return ranked(ctx, args, allReduceSide)
	case "add":
		return alone(ctx, args, addSide)
	case "loader":
		return alone(ctx, args, loaderSide)
	case "optim":
		return alone(ctx, args, optimSide)
	case "checkpoint":
		return alone(ctx, args, checkpointSide)
	case "store":
		return alone(ctx, args, storeSide)
	}
	return fmt.Errorf("there is no side %q", name)
}

// ranked runs a side as a rank, the way any program of goddp does.
func ranked[A any](ctx context.Context, text []byte, side func(context.Context, A) error) error {
	return launch.Run(ctx, 1, func(ctx context.Context, _ launch.Env) error { return start(ctx, text, side) })
}

// alone runs a side that is no rank.
func alone[A any](ctx context.Context, text []byte, side func(context.Context, A) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return start(ctx, text, side)
}

func start[A any](ctx context.Context, text []byte, side func(context.Context, A) error) error {
	var args A
	if err := json.Unmarshal(text, &args); err != nil {
		return fmt.Errorf("%s: %w", argsVar, err)
	}
	threads, err := strconv.Atoi(os.Getenv("OMP_NUM_THREADS"))
	if err != nil {
		return fmt.Errorf("OMP_NUM_THREADS: %w", err)
	}
	if err := tdp.SetNumThreads(threads); err != nil {
		return err
	}
	return side(ctx, args)
}
