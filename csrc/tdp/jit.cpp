#include "tdp_jit.h"

#include "guard.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <vector>

using tdp::Error;
using tdp::guard;
using tdp::need;
using tdp::need_defined;

struct tdp_script {
  torch::jit::Module module;
};

namespace {

std::optional<c10::Device> where(tdp_device d) {
  if (d.type < 0) return std::nullopt;
  return tdp::to_device(d);
}

char *copy(const std::string &s) {
  auto *p = static_cast<char *>(std::malloc(s.size() + 1));
  if (p == nullptr) throw std::bad_alloc();
  std::memcpy(p, s.data(), s.size());
  p[s.size()] = 0;
  return p;
}

// The Python class: the last part of a name such as __torch__.torchvision.models.resnet.___torch_mangle_3.ResNet.
std::string class_name(const torch::jit::Module &m) {
  auto name = m.type()->name();
  return name ? name->name() : "";
}

class Entries {
 public:
  ~Entries() {
    for (auto &e : list_) {
      std::free(e.name);
      std::free(e.type);
      delete e.tensor;
    }
  }

  void add(const torch::jit::Module &m, const std::string &name, int32_t parent) {
    auto self = static_cast<int32_t>(list_.size());
    push(TDP_SCRIPT_MODULE, parent, name).type = copy(class_name(m));
    for (const auto &p : m.named_parameters(/*recurse=*/false))
      push(TDP_SCRIPT_PARAMETER, self, p.name).tensor = new at::Tensor(p.value);
    for (const auto &b : m.named_buffers(/*recurse=*/false))
      push(TDP_SCRIPT_BUFFER, self, b.name).tensor = new at::Tensor(b.value);
    for (const auto &child : m.named_children()) add(child.value, child.name, self);
  }

  void give(tdp_script_entries *out) {
    auto *p = static_cast<tdp_script_entry *>(std::calloc(list_.size(), sizeof(tdp_script_entry)));
    if (p == nullptr) throw std::bad_alloc();
    std::copy(list_.begin(), list_.end(), p);
    *out = {p, static_cast<int32_t>(list_.size())};
    list_.clear();
  }

 private:
  tdp_script_entry &push(int32_t kind, int32_t parent, const std::string &name) {
    list_.push_back({kind, parent, nullptr, nullptr, nullptr});
    list_.back().name = copy(name);
    return list_.back();
  }

  std::vector<tdp_script_entry> list_;
};

void train(torch::jit::Module m, const uint8_t *flags, int32_t n, int32_t &next) {
  if (next >= n) throw Error(TDP_ERR_VALUE, "fewer flags than modules");
  bool on = flags[next++] != 0;
  // What torch.jit.freeze or optimize_for_inference made has no such attribute left.
  if (m.type()->findAttributeSlot("training")) m.setattr("training", on);
  for (const auto &child : m.named_children()) train(child.value, flags, n, next);
}

// What Go gave, as the type that the method declares.
c10::IValue to_ivalue(const tdp_value &v, const c10::TypePtr &type) {
  if (auto optional = type->cast<c10::OptionalType>())
    return v.kind == TDP_VALUE_NONE ? c10::IValue() : to_ivalue(v, optional->getElementType());
  switch (v.kind) {
    case TDP_VALUE_NONE:
      return {};
    case TDP_VALUE_TENSOR:
      return *need(v.t, "a tensor argument");
    case TDP_VALUE_INT:
      if (type->kind() == c10::TypeKind::FloatType) return static_cast<double>(v.i);
      return v.i;
    case TDP_VALUE_DOUBLE:
      return v.d;
    case TDP_VALUE_BOOL:
      return v.i != 0;
    case TDP_VALUE_STRING:
      return std::string(v.s, static_cast<size_t>(v.n));
    case TDP_VALUE_TUPLE: {
      auto tuple = type->cast<c10::TupleType>();
      if (tuple && tuple->elements().size() != static_cast<size_t>(v.n))
        throw Error(TDP_ERR_VALUE, "expected " + tuple->repr_str() + ", got a tuple of " + std::to_string(v.n));
      std::vector<c10::IValue> items;
      for (int64_t i = 0; i < v.n; i++)
        items.push_back(to_ivalue(v.items[i], tuple ? tuple->elements()[i] : c10::AnyType::get()));
      return c10::ivalue::Tuple::create(std::move(items));
    }
    case TDP_VALUE_LIST: {
      auto declared = type->cast<c10::ListType>();
      c10::TypePtr element = declared ? declared->getElementType() : c10::TypePtr(c10::TensorType::get());
      c10::impl::GenericList list(element);
      for (int64_t i = 0; i < v.n; i++) {
        c10::IValue item = to_ivalue(v.items[i], element);
        if (!item.type()->isSubtypeOf(*element))
          throw Error(TDP_ERR_VALUE, "element " + std::to_string(i) + " of a list is " + item.type()->repr_str() +
                                         ", expected " + element->repr_str());
        list.push_back(std::move(item));
      }
      return list;
    }
    case TDP_VALUE_DICT: {
      auto declared = type->cast<c10::DictType>();
      c10::TypePtr key = declared ? declared->getKeyType() : c10::TypePtr(c10::StringType::get());
      c10::TypePtr value = declared ? declared->getValueType() : c10::TypePtr(c10::TensorType::get());
      c10::impl::GenericDict dict(key, value);
      for (int64_t i = 0; i + 1 < v.n; i += 2) {
        c10::IValue k = to_ivalue(v.items[i], key), item = to_ivalue(v.items[i + 1], value);
        if (!k.type()->isSubtypeOf(*key) || !item.type()->isSubtypeOf(*value))
          throw Error(TDP_ERR_VALUE, "a dict entry is " + k.type()->repr_str() + ": " + item.type()->repr_str() +
                                         ", expected " + key->repr_str() + ": " + value->repr_str());
        dict.insert_or_assign(std::move(k), std::move(item));
      }
      return dict;
    }
  }
  throw Error(TDP_ERR_VALUE, "unknown kind of value " + std::to_string(v.kind));
}

tdp_value *room(int64_t n) {
  if (n == 0) return nullptr;
  auto *p = static_cast<tdp_value *>(std::calloc(static_cast<size_t>(n), sizeof(tdp_value)));
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

// Fills v, which is zeroed. On an error what is filled is complete enough for tdp_value_clear.
void from_ivalue(const c10::IValue &in, tdp_value &v) {
  auto items = [&](int32_t kind, int64_t n) {
    v.kind = kind;
    v.items = room(n);
    v.n = n;
  };
  if (in.isNone()) {
    v.kind = TDP_VALUE_NONE;
  } else if (in.isTensor()) {
    v.kind = TDP_VALUE_TENSOR;
    v.t = new at::Tensor(in.toTensor());
  } else if (in.isBool()) {
    v.kind = TDP_VALUE_BOOL;
    v.i = in.toBool();
  } else if (in.isInt()) {
    v.kind = TDP_VALUE_INT;
    v.i = in.toInt();
  } else if (in.isDouble()) {
    v.kind = TDP_VALUE_DOUBLE;
    v.d = in.toDouble();
  } else if (in.isString()) {
    const std::string &s = in.toStringRef();
    v.s = copy(s);
    v.n = static_cast<int64_t>(s.size());
    v.kind = TDP_VALUE_STRING;
  } else if (in.isTuple()) {
    const auto &tuple = in.toTupleRef();
    items(TDP_VALUE_TUPLE, static_cast<int64_t>(tuple.elements().size()));
    auto type = tuple.type();
    for (int64_t i = 0; i < v.n; i++) {
      from_ivalue(tuple.elements()[i], v.items[i]);
      if (type && type->schema()) v.items[i].name = copy(type->schema()->arguments()[i].name());
    }
  } else if (in.isList()) {
    auto list = in.toList();
    items(TDP_VALUE_LIST, static_cast<int64_t>(list.size()));
    for (int64_t i = 0; i < v.n; i++) from_ivalue(list.get(i), v.items[i]);
  } else if (in.isGenericDict()) {
    auto dict = in.toGenericDict();
    items(TDP_VALUE_DICT, static_cast<int64_t>(2 * dict.size()));
    int64_t i = 0;
    for (const auto &entry : dict) {
      from_ivalue(entry.key(), v.items[i++]);
      from_ivalue(entry.value(), v.items[i++]);
    }
  } else {
    throw Error(TDP_ERR_UNSUPPORTED, "a result of type " + in.type()->repr_str() + " has no counterpart in Go");
  }
}

}  // namespace

extern "C" {

tdp_error *tdp_script_load(const char *path, tdp_device device, tdp_script **out) {
  return guard([&] { *out = new tdp_script{torch::jit::load(std::string(path), where(device))}; });
}

tdp_error *tdp_script_load_data(const void *data, uint64_t size, tdp_device device, tdp_script **out) {
  return guard([&] {
    std::istringstream in(std::string(static_cast<const char *>(data), size));
    *out = new tdp_script{torch::jit::load(in, where(device))};
  });
}

tdp_error *tdp_script_save(tdp_script *s, const char *path) {
  return guard([&] { need(s, "the TorchScript module")->module.save(std::string(path)); });
}

tdp_error *tdp_script_save_data(tdp_script *s, tdp_bytes *out) {
  return guard([&] {
    std::ostringstream stream;
    need(s, "the TorchScript module")->module.save(stream);
    std::string text = stream.str();
    *out = {reinterpret_cast<uint8_t *>(copy(text)), text.size()};
  });
}

tdp_error *tdp_script_free(tdp_script *s) {
  return guard([&] { delete s; });
}

tdp_error *tdp_script_tree(tdp_script *s, tdp_script_entries *out) {
  return guard([&] {
    Entries list;
    list.add(need(s, "the TorchScript module")->module, "", -1);
    list.give(out);
  });
}

void tdp_script_entries_free(tdp_script_entries *list) {
  for (int32_t i = 0; i < list->n; i++) {
    std::free(list->entries[i].name);
    std::free(list->entries[i].type);
    tdp_error_free(tdp_tensor_free(list->entries[i].tensor));
  }
  std::free(list->entries);
  *list = {nullptr, 0};
}

tdp_error *tdp_script_train(tdp_script *s, const uint8_t *flags, int32_t n) {
  return guard([&] {
    int32_t next = 0;
    train(need(s, "the TorchScript module")->module, flags, n, next);
    if (next != n) throw Error(TDP_ERR_VALUE, "more flags than modules");
  });
}

tdp_error *tdp_script_call(tdp_script *s, const char *method, const tdp_value *args, int32_t n, tdp_value *out) {
  return guard([&] {
    auto &m = need(s, "the TorchScript module")->module;
    auto found = m.find_method(method);
    if (!found) throw Error(TDP_ERR_VALUE, "the TorchScript module has no method " + std::string(method));
    const auto &wanted = found->function().getSchema().arguments();  // the first is self
    std::vector<c10::IValue> inputs;
    for (int32_t i = 0; i < n; i++) {
      size_t at = static_cast<size_t>(i) + 1;
      inputs.push_back(to_ivalue(args[i], at < wanted.size() ? wanted[at].type() : c10::AnyType::get()));
    }
    c10::IValue result = (*found)(std::move(inputs));
    tdp_value value{};
    try {
      from_ivalue(result, value);
    } catch (...) {
      tdp_value_clear(&value);
      throw;
    }
    *out = value;
  });
}

void tdp_value_clear(tdp_value *v) {
  for (int64_t i = 0; v->items != nullptr && i < v->n; i++) tdp_value_clear(&v->items[i]);
  std::free(v->items);
  std::free(v->s);
  std::free(v->name);
  tdp_error_free(tdp_tensor_free(v->t));
  *v = tdp_value{};
}

tdp_error *tdp_script_optimize(int32_t enabled, int32_t *previous) {
  return guard([&] {
    *previous = torch::jit::getGraphExecutorOptimize();
    torch::jit::setGraphExecutorOptimize(enabled != 0);
  });
}

}  // extern "C"
