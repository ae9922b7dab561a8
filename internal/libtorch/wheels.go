package libtorch

import (
	"path"
	"strings"
)

// wheel is one file of the package index, pinned by its content.
type wheel struct {
	name, version string
	file          string // what the index calls it
	sha256        string
	size          int64
	cpu           bool // the CPU flavour needs it, too
}

// The wheel of torch holds C++ headers and libraries beside its Python; those for CPython 3.11 are taken whatever
// Python is here, as none of the Python part is used. The NVIDIA wheels are those that its METADATA asks for, plus the
// two with headers that c10d's NCCL header includes (crt, cccl). Triton and the Python bindings are not needed.
var wheels = []wheel{
	{"torch", "2.11.0", "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
		"7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a", 530604548, true},
	{"nvidia-cuda-runtime", "13.0.96", "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548", 2243632, true},
	{"nvidia-cuda-cupti", "13.0.85", "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
		"4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8", 10715597, true},
	{"nvidia-cublas", "13.1.0.3", "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl",
		"ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171", 423133236, false},
	{"nvidia-cuda-nvrtc", "13.0.88", "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
		"ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575", 90215200, false},
	{"nvidia-cudnn-cu13", "9.19.0.56", "nvidia_cudnn_cu13-9.19.0.56-py3-none-manylinux_2_27_x86_64.whl",
		"d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf", 366066321, false},
	{"nvidia-cufft", "12.0.0.61", "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3", 214085489, false},
	{"nvidia-cufile", "1.15.1.6", "nvidia_cufile-1.15.1.6-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44", 1223672, false},
	{"nvidia-curand", "10.4.0.35", "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_x86_64.whl",
		"1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc", 59544258, false},
	{"nvidia-cusolver", "12.0.4.66", "nvidia_cusolver-12.0.4.66-py3-none-manylinux_2_27_x86_64.whl",
		"0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112", 200941980, false},
	{"nvidia-cusparse", "12.6.3.3", "nvidia_cusparse-12.6.3.3-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b", 145942937, false},
	{"nvidia-cusparselt-cu13", "0.8.0", "nvidia_cusparselt_cu13-0.8.0-py3-none-manylinux2014_x86_64.whl",
		"25e30a8a7323935d4ad0340b95a0b69926eee755767e8e0b1cf8dd85b197d3fd", 169884119, false},
	{"nvidia-nccl-cu13", "2.28.9", "nvidia_nccl_cu13-2.28.9-py3-none-manylinux_2_18_x86_64.whl",
		"e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42", 196493177, false},
	{"nvidia-nvjitlink", "13.0.88", "nvidia_nvjitlink-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
		"13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b", 40713933, false},
	{"nvidia-nvshmem-cu13", "3.4.5", "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80", 60412546, false},
	{"nvidia-nvtx", "13.0.85", "nvidia_nvtx-13.0.85-py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl",
		"4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4", 148047, false},
	{"nvidia-cuda-crt", "13.0.88", "nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4", 134086, false},
	{"nvidia-cuda-cccl", "13.0.85", "nvidia_cuda_cccl-13.0.85-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
		"e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649", 3120526, false},
}

func wheelsOf(f Flavor) []wheel {
	var out []wheel
	for _, w := range wheels {
		if w.cpu || f == CUDA {
			out = append(out, w)
		}
	}
	return out
}

// platforms are the tags that pip may choose from: those of glibc 2.28 and older.
var platforms = []string{"manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_25_x86_64", "manylinux_2_18_x86_64",
	"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux_2_5_x86_64",
	"manylinux1_x86_64"}

// treeBytes is about what the tree of a flavour takes on disk.
var treeBytes = map[Flavor]int64{CPU: 570e6, CUDA: 3600e6}

// keep chooses the files of a wheel that belong in the tree: headers, libraries, licences. It leaves out the Python
// part (whose modules are half of the files), and, for CPU, the CUDA libraries (half of the bytes).
func keep(f Flavor, name string) bool {
	base := path.Base(name)
	switch {
	case strings.Contains(name, ".dist-info/"):
		return true // licences, and RECORD
	case name == "torch/version.py":
		return true
	case strings.HasPrefix(name, "torch/include/"):
		return true
	case strings.HasPrefix(name, "torch/lib/"):
		if strings.Count(name, "/") > 2 || strings.HasPrefix(base, "libtorch_python") || strings.HasPrefix(base, "libshm") {
			return false
		}
		return f == CUDA || !strings.Contains(base, "cuda") && !strings.Contains(base, "nvshmem") &&
			!strings.Contains(base, "nvrtc") && base != "libtorch.so" && base != "libtorch_global_deps.so"
	case strings.HasPrefix(name, "nvidia/") && strings.Contains(name, "/lib/"):
		if !strings.Contains(base, ".so") || strings.HasPrefix(base, "libcusolverMg") || strings.Contains(base, ".alt.") {
			return false
		}
		// The profiler's helpers are of use on a GPU only.
		return f == CUDA || base == "libcudart.so.13" || base == "libcupti.so.13"
	case strings.HasPrefix(name, "nvidia/") && strings.Contains(name, "/include/"):
		return f == CUDA
	}
	return false
}
