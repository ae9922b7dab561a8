package gotchprep

// refusedOps are the C functions whose C++ call still compiles with libtorch 2.11 but no longer means the same, and what a
// caller is told. See checkSchemas, which finds them.
var refusedOps = map[string]string{
	"atg__efficient_attention_backward": "libtorch 2.11 takes max_seqlen_q before max_seqlen_k, which this wrapper passes the other way round",
	"atg__flash_attention_backward":     "libtorch 2.11 takes rng_state where this wrapper passes philox_seed and philox_offset",
}

// mendedOps are wrappers that differ from libtorch's overloads and are right all the same.
var mendedOps = map[string]string{
	"atg__cslt_sparse_mm":       "overload in goddp_compat.h",
	"atg__scaled_mm":            "overload in goddp_compat.h",
	"atg__scaled_mm_out":        "overload in goddp_compat.h",
	"atg__addmm_activation":     "overload in goddp_compat.h",
	"atg__addmm_activation_out": "overload in goddp_compat.h",
	"atg_rrelu":                 "overload in goddp_compat.h",
	"atg_rrelu_":                "overload in goddp_compat.h",
	"atg_rrelu_with_noise":      "overload in goddp_compat.h",
	"atg_rrelu_with_noise_":     "overload in goddp_compat.h",
	"atg_rrelu_with_noise_out":  "overload in goddp_compat.h",
	"atg_trapezoid":             "overload in goddp_compat.h",
	"atg_cumulative_trapezoid":  "overload in goddp_compat.h",
	"atg_to":                    "a device converts to TensorOptions",
}

// ownFiles are the files of ours that go into the copy.
var ownFiles = map[string]string{
	"libtch/goddp.go": "libtch.go.txt",
	"ts/goddp.go":     "ts_tensor.go.txt",
	"ts/goddp_jit.go": "ts_jit.go.txt",
	"nn/goddp.go":     "nn.go.txt",
}

// replacements, with the hash of each declaration as gotch v0.9.1 has it.
var replacements = []replaced{
	{file: "libtch/tensor.go", what: map[string]string{
		"AtDevice":            "dceb00f7",
		"AtcSetDevice":        "4877d405",
		"AtGradSetEnabled":    "1a06c974",
		"AtSaveMulti":         "9dacbd27",
		"AtSaveMultiNew":      "d280d453",
		"AtLoadMulti":         "af8df389",
		"AtToString":          "0c826b2a",
		"AtiToString":         "b4e1c1d5",
		"AtiBoolList":         "3a33ab04",
		"AtoGetLearningRates": "f8f5d791",
		"AtoSetLearningRates": "5dd9c1cc",
		"AtmSetProfilingMode": "831161b8",
		"AtmLoadStr":          "63dbbdb2",
		"AtmLoadStrOnDevice":  "609fa9d2",
		"AtSaveImage":         "1ff8fda6",
		"GetAndResetLastErr":  "a2861f85",
		"nativeEndian":        "72f9e007",
		"init":                "1435e9a4",
	}},
	{file: "libtch/scalar.go", what: map[string]string{
		"AtsToString": "9e3c7ec6",
	}},
	{file: "libtch/device.go", what: map[string]string{
		"Atc_cuda_device_count": "568498d0",
	}},
	{file: "ts/tensor.go", what: map[string]string{
		"TensorCount":          "dc8afc98",
		"bigStruct":            "1f884261",
		"Tensor":               "53e7431f",
		"newTensor":            "50c50b9d",
		"New":                  "8f9e8af6",
		"CheckCMemLeak":        "af1f2b9e",
		"CleanUp":              "6e89edee",
		"Tensor.Ctensor":       "86475a40",
		"freeCTensor":          "77e3a1fc",
		"newName":              "a333e64c",
		"NewTensor":            "e08290c4",
		"FromCtensor":          "aac36980",
		"Tensor.Name":          "9074a013",
		"Tensor.Dim":           "8383276f",
		"Tensor.Size":          "90101838",
		"Tensor.Stride":        "8e58f1f3",
		"Tensor.nbytes":        "3b479d93",
		"decodeSize":           "db41470c",
		"Tensor.DType":         "006f9464",
		"Tensor.Float64Value":  "0a5c96ce",
		"Tensor.Int64Value":    "39a7ea2a",
		"Tensor.ZeroGrad":      "29635972",
		"RunBackward":          "b7fcfcd1",
		"Tensor.CopyDataUint8": "72dd2698",
		"Tensor.CopyData":      "08b3f002",
		"Tensor.Vals":          "c50c112e",
		"Tensor.Float64Values": "e2209a1c",
		"LoadMulti":            "fab96882",
		"LoadMultiWithDevice":  "083e8a99",
		"Tensor.Drop":          "971e30cc",
		"GradSetEnabled":       "db5d262e",
		"NoGrad":               "488f236c",
		"NoGrad1":              "095d4494",
		"NoGradGuard":          "fcc1f3d6",
		"NewNoGradGuard":       "f017dff2",
		"noGradGuardInit":      "1d0942a6",
		"NoGradGuard.Drop":     "502de5ff",
		"NoGradGuard.Enable":   "4e0e1eda",
		"CudaSetDevice":        "0fe4e8dc",
	}},
	{file: "ts/patch.go", what: map[string]string{
		"MustWhere": "44723267",
	}},
	{file: "ts/error.go", what: map[string]string{
		"ptrToString": "8d3caeef",
		"TorchErr":    "e67a07b8",
	}},
	{file: "ts/scalar.go", what: map[string]string{
		"Scalar":          "c1770232",
		"freeCScalar":     "a9e3c1b3",
		"newScalarName":   "f94c0a45",
		"newScalar":       "46d854e7",
		"Scalar.nbytes":   "abc6ec9e",
		"IntScalar":       "1511516e",
		"FloatScalar":     "4261c520",
		"Scalar.Drop":     "7280f7e4",
		"Scalar.MustDrop": "cd1990fa",
	}},
	{file: "ts/optimizer.go", what: map[string]string{
		"COptimizer.Drop": "f82a84aa",
	}},
	{file: "ts/image.go", what: map[string]string{
		"LoadHwc": "2b897e4e",
		"SaveHwc": "e9a10415",
	}},
	{file: "ts/jit.go", what: map[string]string{
		"NewIValue":               "1b0b0e3f",
		"IValue.ToCIValue":        "2cc95aff",
		"IValueFromC":             "6a02fac9",
		"CModule.Drop":            "ba5a975f",
		"ModuleLoadData":          "997df634",
		"ModuleLoadDataOnDevice":  "a9c8cd07",
		"CModule.ForwardTs":       "5ab4ba7f",
		"CModule.ForwardIs":       "36ac621d",
		"CModule.NamedParameters": "3a3fc9b6",
	}},
	{file: "nn/optimizer.go", what: map[string]string{
		"Optimizer.ClipGradValue": "3a6c11bc",
		"Optimizer.ClipGradNorm":  "9fd183aa",
	}},
}

var mends = []mend{
	{"nn/batch-norm.go", "\t\tconfig:      config,\n\t\tRunningMean:", "\t\tconfig:      config,\n\t\tNd:          nd,\n\t\tRunningMean:", 1,
		"the number of dimensions was never set, so the check of the input's was dead"},
	{"nn/varstore.go", "path = append(path, str)", "path = append(path[:len(path):len(path)], str)", 1,
		"two sub-paths of one path could share memory, and the second rename the first"},
	{"nn/varstore.go", "\t\t\tdtype := v.Tensor.DType()\n\t\t\tif gotch.IsFloatDType(dtype) {", "\t\t\tif gotch.IsFloatDType(v.Tensor.DType()) {", 1,
		"the wanted dtype was hidden by the present one, so ToHalf did nothing"},
	{"nn/varstore.go", "err := v.Tensor.RequiresGrad_(true)\n\t\t\terr = fmt.Errorf(\"VarStore.Freeze() set 'requiresGrad' for tensor %q failed.\", name)\n\t\t\treturn err",
		"if err := v.Tensor.RequiresGrad_(true); err != nil {\n\t\t\t\treturn fmt.Errorf(\"VarStore.Unfreeze %q: %w\", name, err)\n\t\t\t}", 1,
		"Unfreeze failed after the first variable, without a reason"},
	{"device.go", "return Device{Name: \"CPU\", Value: 1}", "return CPU", 1, "the CPU of a tensor was not equal to gotch.CPU"},
	{"dtype.go", "given DType %v\\n\", typ.String())", "given DType %v\", dt)", 1, "a nil type was asked for its name"},
}
