package models_test

import (
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
)

func ExampleNewResNet18() {
	// Ten classes of small images: the stem of CIFAR networks.
	net, err := models.NewResNet18(models.ResNetOptions{NumClasses: 10, CIFARStem: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	images := ts.MustOnes([]int64{2, 3, 32, 32}, gotch.Float, gotch.CPU)
	scores, err := nn.Evaluate(net, images)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(scores.MustSize())
	// Output: [2 10]
}

func ExampleLoadScript() {
	// In Python: torch.jit.save(torch.jit.script(model), "model.pt")
	m, err := models.LoadScript("model.pt", gotch.CPU)
	if err != nil {
		fmt.Println(err)
		return
	}
	for name := range m.NamedParameters() { // in Python's order
		fmt.Println(name)
	}
	if err := m.Save("trained.pt"); err != nil {
		fmt.Println(err)
	}
	// Output: load TorchScript: stat model.pt: no such file or directory
}
