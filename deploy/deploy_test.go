// Package deploy has the sample files for schedulers; its test reads them as the schedulers would.
package deploy

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// podSpec is what a manifest's pods have, wherever the kind keeps it.
type podSpec struct {
	Containers []struct {
		Name, Image   string
		Command, Args []string // a number without quotes would not be one
		VolumeMounts  []struct {
			Name      string
			MountPath string `yaml:"mountPath"`
		} `yaml:"volumeMounts"`
	}
	Volumes []struct{ Name string }
}

// pods finds the pod specs below a node: the mappings that have containers.
func pods(n *yaml.Node) (found []*yaml.Node) {
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if n.Content[i].Value == "containers" {
				return []*yaml.Node{n}
			}
		}
	}
	for _, c := range n.Content {
		found = append(found, pods(c)...)
	}
	return found
}

func TestManifests(t *testing.T) {
	files, err := filepath.Glob("kubernetes/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 4)
	for _, name := range files {
		t.Run(filepath.Base(name), func(t *testing.T) {
			f, err := os.Open(name)
			require.NoError(t, err)
			defer f.Close()
			kinds := map[string]int{}
			count := 0
			for d := yaml.NewDecoder(f); ; {
				var doc yaml.Node
				if err := d.Decode(&doc); errors.Is(err, io.EOF) {
					break
				} else {
					require.NoError(t, err)
				}
				var head struct {
					APIVersion string `yaml:"apiVersion"`
					Kind       string
					Metadata   struct{ Name string }
				}
				require.NoError(t, doc.Decode(&head))
				require.NotEmpty(t, head.APIVersion)
				require.NotEmpty(t, head.Kind)
				require.NotEmpty(t, head.Metadata.Name)
				kinds[head.Kind]++
				for _, n := range pods(&doc) {
					var pod podSpec
					require.NoError(t, n.Decode(&pod))
					volumes := map[string]bool{}
					for _, v := range pod.Volumes {
						volumes[v.Name] = true
					}
					for _, c := range pod.Containers {
						count++
						require.NotEmpty(t, c.Image)
						require.NotEmpty(t, append(c.Command, c.Args...), "what runs in %s", c.Name)
						for _, m := range c.VolumeMounts {
							require.True(t, volumes[m.Name], "%s mounts %s, which the pod does not have", c.Name, m.Name)
							require.True(t, filepath.IsAbs(m.MountPath))
						}
					}
				}
			}
			require.Positive(t, count, "containers")
			require.Len(t, kinds, map[bool]int{true: 2, false: 1}[kinds["Service"] > 0], "kinds: %v", kinds)
		})
	}
}

func TestBatchScripts(t *testing.T) {
	files, err := filepath.Glob("slurm/*.sbatch")
	require.NoError(t, err)
	require.Len(t, files, 4)
	for _, name := range files {
		out, err := exec.Command("bash", "-n", name).CombinedOutput()
		require.NoError(t, err, "%s: %s", name, out)
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(text), "#!"), name)
		// Slurm stops looking for its lines at the first command.
		command := false
		for line := range strings.Lines(string(text)) {
			directive := strings.HasPrefix(line, "#SBATCH")
			require.False(t, directive && command, "%s: %q comes after a command", name, line)
			command = command || !strings.HasPrefix(line, "#") && strings.TrimSpace(line) != ""
		}
	}
}
