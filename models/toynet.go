package models

import "github.com/goddp/goddp/models/nn"

// NewToyNet makes the tutorials' smallest model, nn.Linear(20, 1), with the weights that Python's would draw.
func NewToyNet() (*nn.Linear, error) { return nn.NewLinear(20, 1, nn.LinearOptions{}) }
