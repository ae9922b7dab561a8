// Functions of ours beside gotch's: one call where gotch needs several.

extern "C" gd_ptr gd_dropped_mark() { return {&goddp::dropped_mark, nullptr}; }

// The number of dimensions; the first cap sizes (strides != 0: strides) go to dims.
extern "C" gd_int gd_at_sizes(tensor t, int64_t *dims, int cap, int strides) {
  gd_int r = {};
  try {
    goddp::need(t, "self");
    auto list = strides ? t->strides() : t->sizes();
    r.out = static_cast<int>(list.size());
    for (int i = 0; i < r.out && i < cap; ++i) dims[i] = list[i];
  } catch (...) {
    r.err = goddp::caught();
  }
  return r;
}

// gotch's dtype numbers are c10's.
static_assert(static_cast<int>(at::kFloat) == 6 && static_cast<int>(at::kLong) == 4, "c10::ScalarType has been renumbered");

// One learning rate for each parameter group.
extern "C" char *gd_ato_get_learning_rates_n(optimizer o, double *lrs, int64_t n) {
  char *err = nullptr;
  try {
    goddp::need(o, "optimizer");
    auto &groups = o->param_groups();
    if (static_cast<int64_t>(groups.size()) != n) throw goddp::Misuse('V', "the number of parameter groups changed");
    for (int64_t i = 0; i < n; ++i) lrs[i] = groups[i].options().get_lr();
  } catch (...) {
    err = goddp::caught();
  }
  return err;
}
