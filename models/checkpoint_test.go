package models

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
)

// stateDictPython is the other side of TestTorchvisionStateDictBothWays: it saves what it trained, or loads strictly and
// tells what it has.
const stateDictPython = `
import hashlib, json, sys, torch, torchvision
torch.set_num_threads(1)
def sha(t):
    return hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
x = ((torch.arange(2*3*32*32) * 37 % 101).float() / 50 - 1).reshape(2, 3, 32, 32)
y = torch.arange(2) * 7 % 1000
what, path = sys.argv[1:]
torch.manual_seed(3)
m = torchvision.models.resnet18()
if what == "save":
    opt = torch.optim.SGD(m.parameters(), lr=0.01)
    for _ in range(2):
        opt.zero_grad(); torch.nn.functional.cross_entropy(m(x), y).backward(); opt.step()
    torch.save(m.state_dict(), path)
else:
    state = torch.load(path, weights_only=True)
    m.load_state_dict(state, strict=True)
    assert state._metadata == m.state_dict()._metadata, "versions of the modules"
    assert list(state) == list(m.state_dict()), "order"
m.eval()
with torch.no_grad():
    out = sha(m(x))
print(json.dumps({"state": [sha(t) for t in m.state_dict().values()], "eval": out}))
`

func TestTorchvisionStateDictBothWays(t *testing.T) {
	dir := t.TempDir()
	theirs, ours := filepath.Join(dir, "theirs.pth"), filepath.Join(dir, "ours.pth")
	type side struct {
		State []string
		Eval  string
	}
	var want, back side
	require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, stateDictPython, "save", theirs)), &want))

	oneThread(t)
	m, err := NewResNet18(ResNetOptions{})
	require.NoError(t, err)
	sd, err := checkpoint.LoadStateDictFile(theirs, checkpoint.LoadOptions{})
	require.NoError(t, err)
	_, err = checkpoint.LoadStateDict(m, sd, true)
	require.NoError(t, err)
	require.Equal(t, want.State, stateDigests(t, m))
	x, y := scriptData(t, 1000, 2, 3, 32, 32)
	out, err := nn.Evaluate(m, x)
	require.NoError(t, err)
	require.Equal(t, want.Eval, sha(t, out))

	_, eval := trainScript(t, m, x, y, 1)
	require.NotEqual(t, want.Eval, eval)
	require.NoError(t, checkpoint.Save(ours, checkpoint.ModuleState(m)))
	require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, stateDictPython, "load", ours)), &back))
	require.Equal(t, stateDigests(t, m), back.State)
	require.Equal(t, eval, back.Eval)
}

// TestStateDictThatDoesNotFit: a missing buffer, an unknown name and another shape are named, and nothing is loaded.
func TestStateDictThatDoesNotFit(t *testing.T) {
	m, err := NewResNet18(ResNetOptions{NumClasses: 10})
	require.NoError(t, err)
	other, err := NewResNet18(ResNetOptions{NumClasses: 7})
	require.NoError(t, err)
	before := stateDigests(t, m)
	sd := checkpoint.NewStateDict()
	for name, p := range other.NamedState() {
		switch name {
		case "bn1.running_mean":
		case "layer1.0.conv1.weight":
			sd.Set("layer1.0.konv.weight", p)
		default:
			sd.Set(name, p)
		}
	}
	_, err = checkpoint.LoadStateDict(m, sd, true)
	var e *checkpoint.StateDictError
	require.ErrorAs(t, err, &e)
	require.Equal(t, []string{"bn1.running_mean", "layer1.0.conv1.weight"}, e.Missing)
	require.Equal(t, []string{"layer1.0.konv.weight"}, e.Unexpected)
	require.Equal(t, []checkpoint.Mismatch{{Name: "fc.weight", File: []int64{7, 512}, Model: []int64{10, 512}},
		{Name: "fc.bias", File: []int64{7}, Model: []int64{10}}}, e.Mismatched)
	for _, text := range []string{"bn1.running_mean", "fc.weight", "[7, 512]", "[10, 512]"} {
		require.Contains(t, err.Error(), text)
	}
	require.Equal(t, before, stateDigests(t, m))
}

func TestResNetErrors(t *testing.T) {
	_, err := NewResNet("resnet19", ResNetOptions{})
	require.ErrorIs(t, err, tdp.ErrValue)
	require.ErrorContains(t, err, "wide_resnet101_2")
	_, err = NewResNet18(ResNetOptions{Groups: 2})
	require.ErrorContains(t, err, "basic blocks")
	_, err = NewResNet34(ResNetOptions{ReplaceStrideWithDilation: [3]bool{false, true, true}})
	require.ErrorIs(t, err, tdp.ErrUnsupported)
	_, err = NewResNet50(ResNetOptions{NumClasses: -1})
	require.ErrorIs(t, err, tdp.ErrValue)

	m, err := NewResNet18(ResNetOptions{CIFARStem: true, NumClasses: 10})
	require.NoError(t, err)
	gray := empty(t, 2, 1, 32, 32)
	_, err = nn.Forward(m, gray, true)
	require.ErrorContains(t, err, "conv1: Conv2d(3, 64, kernel_size=(3, 3)")
	require.ErrorContains(t, err, "got an input of shape [2 1 32 32], its weight has shape [64 3 3 3]")
	replaced := m.Layer2.(*nn.Sequential).At(0).(*BasicBlock)
	replaced.Conv2 = conv3x3(64, 128, 1, 1, 1)
	for range nn.NamedModules(m) { // the tree learns of the new layer; DDP and optimizers walk it as well
	}
	_, err = nn.Forward(m, empty(t, 2, 3, 32, 32), true)
	var e *nn.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "layer2.0.conv2", e.Path)
	require.Equal(t, []int64{2, 128, 16, 16}, e.Input)
	require.Equal(t, []int64{128, 64, 3, 3}, e.Weight)

	simple, err := NewSimpleNet()
	require.NoError(t, err)
	_, err = nn.Forward(simple, empty(t, 3, 5), true)
	require.ErrorContains(t, err, "784")

	m.FC = nn.Must(nn.NewLinear(512, 3, nn.LinearOptions{})) // transfer to three classes
	s, err := nn.Summarize(m)
	require.NoError(t, err)
	require.Equal(t, "ResNet", s.Model)
	require.Equal(t, "fc", m.FC.Path())
}

// TestCountsLikeTorchvision holds the parameter counts that torchvision documents.
func TestCountsLikeTorchvision(t *testing.T) {
	for name, want := range map[string]int64{"resnet18": 11689512, "resnet50": 25557032} {
		m, err := NewResNet(name, ResNetOptions{})
		require.NoError(t, err)
		s, err := nn.Summarize(m)
		require.NoError(t, err)
		require.Equal(t, want, s.Parameters)
		m.Drop()
	}
}
