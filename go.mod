module github.com/goddp/goddp

go 1.26.0

require (
	github.com/NVIDIA/go-nvml v0.13.0-1
	github.com/spf13/pflag v1.0.10
	github.com/stretchr/testify v1.12.1
	github.com/sugarme/gotch v0.9.1
	go.uber.org/multierr v1.11.0
	golang.org/x/image v0.47.0
	golang.org/x/sys v0.49.0
	golang.org/x/term v0.47.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
