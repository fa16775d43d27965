// A device type on the CPU whose tensors do not mix with CPU tensors.
//
// torch keeps the key PrivateUse1 for devices that it does not know. Here memory of
// such a device is the memory of a CPU storage, which its owner, the device's storage,
// holds as context. An operator without a kernel of its own (all that torch does not
// compose of others) gets CPU tensors on that memory, runs its CPU kernel, and its
// results are put on the device: views stay views, and every bit is the CPU's.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using c10::StorageImpl;
using torch::jit::Stack;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 8;
thread_local c10::DeviceIndex current = 0;

Device with_index(Device device) {
  return {TYPE, device.has_index() ? device.index() : current};
}

// -- memory ---------------------------------------------------------------------------

void drop(void* owner) {
  delete static_cast<Storage*>(owner);
}

c10::DataPtr hold(const Storage& host, Device device) {
  return {host.mutable_data(), new Storage(host), &drop, device};
}

Storage host_storage(const Storage& storage) {
  const auto& pointer = storage.data_ptr();
  if (pointer.get_deleter() == &drop) {
    return *static_cast<Storage*>(pointer.get_context());
  }
  // torch made it for memory of this device, as it does to save a storage.
  c10::DataPtr same(storage.mutable_data(), c10::kCPU);
  return {Storage::use_byte_size_t(), storage.nbytes(), std::move(same)};
}

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto host = Storage(
        Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true);
    return hold(host, with_index({TYPE, -1}));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

// The memory of `host` may have moved: a kernel resized it.
void follow(const Storage& storage, const Storage& host) {
  if (storage.data_ptr().get() == host.data_ptr().get() &&
      storage.nbytes() == host.nbytes()) {
    return;
  }
  auto kept = host;  // its owner is replaced next
  storage.set_data_ptr_noswap(hold(kept, storage.device()));
  storage.set_nbytes(kept.nbytes());
}

// A tensor like this one, on a storage of the other device.
Tensor alike(const Tensor& like, const Storage& storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      Storage(storage), DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like._is_zerotensor()) impl->_set_zero(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

Tensor host_view(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == TYPE, "host_view of ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, "host_view of ", tensor.layout());
  return alike(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU);
}

// -- random numbers -------------------------------------------------------------------

struct Generator : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator inner)
      : GeneratorImpl{Device(TYPE, index), DispatchKeySet(c10::DispatchKey::PrivateUse1)},
        host(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device_.index(), host.clone());
  }
  at::Generator host;
};

at::Generator new_generator(c10::DeviceIndex index) {
  auto device = with_index({TYPE, index});
  return at::make_generator<Generator>(
      device.index(), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < DEVICES; ++i) made.push_back(new_generator(i));
    return made;
  }();
  return all.at(with_index({TYPE, index}).index());
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == TYPE,
      "Expected a '", Device(TYPE), "' device type for generator but found '",
      generator.device(), "'");
  return generator.get<Generator>()->host;
}

// Some kernels take no generator: they draw from the CPU's default one, which gets the
// state of the device's for that time.
struct LendDefault {
  LendDefault() {
    saved = cpu.get_state();
    cpu.set_state(device.get_state());
  }
  ~LendDefault() {
    device.set_state(cpu.get_state());
    cpu.set_state(saved);
  }
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Generator device = default_generator(-1);
  Tensor saved;
};

// -- operators ------------------------------------------------------------------------

// One call of an operator: its device tensors and what the CPU kernel got for them.
struct Call {
  const OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the device, on the host
  std::unordered_map<StorageImpl*, Storage> storages;  // of the device, by the host's
  std::optional<Device> device;
  std::vector<Tensor> from_cpu;

  Tensor to_host(const Tensor& tensor, bool any_cpu = false) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != TYPE) {
      if (!any_cpu) from_cpu.push_back(tensor);
      return tensor;
    }
    meet(tensor.device());
    for (auto& [known, host] : pairs) {
      if (known.is_same(tensor)) return host;
    }
    auto host = host_view(tensor);
    storages.emplace(host.storage().unsafeGetStorageImpl(), tensor.storage());
    pairs.emplace_back(tensor, host);
    return host;
  }

  void meet(Device other) {
    if (!device) device = other;
    TORCH_CHECK(
        *device == other,
        "Expected all tensors to be on the same device, but found at least two "
        "devices, ", *device, " and ", other, "! (", op.operator_name(), ")");
  }

  IValue to_host(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      const auto* alias = argument.alias_info();
      if (alias && alias->isWrite() && tensor.defined()) meet(tensor.device());
      return to_host(tensor);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> hosts;
      for (const auto& t : value.toTensorVector()) hosts.push_back(to_host(t));
      return hosts;
    }
    if (value.isOptionalTensorList()) {  // only indices, which may be on the CPU
      c10::List<std::optional<Tensor>> hosts;
      for (const std::optional<Tensor> t : value.toOptionalTensorList()) {
        hosts.push_back(t ? std::optional<Tensor>(to_host(*t, true)) : t);
      }
      return hosts;
    }
    if (value.isStorage()) {
      auto storage = value.toStorage();
      meet(storage.device());
      auto host = host_storage(storage);
      storages.emplace(host.unsafeGetStorageImpl(), storage);
      return host;
    }
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      device = with_index(value.toDevice());
      return Device(c10::kCPU);
    }
    return value;
  }

  // What a CPU kernel needs a generator for draws from the device's.
  IValue with_generator(const IValue& value, const c10::Argument& argument) {
    auto optional = argument.type()->cast<c10::OptionalType>();
    if (!optional || optional->getElementType()->kind() != c10::TypeKind::GeneratorType)
      return value;
    auto index = device ? device->index() : c10::DeviceIndex(-1);
    return host_generator(
        value.isNone() ? default_generator(index) : value.toGenerator());
  }

  void check_devices() {
    if (!device) device = with_index({TYPE, -1});
    for (const auto& tensor : from_cpu) {
      if (tensor.dim() || tensor.device() != c10::kCPU) meet(tensor.device());
    }
  }

  const Storage& device_storage(const Storage& host) {
    auto* impl = host.unsafeGetStorageImpl();
    auto known = storages.find(impl);
    if (known == storages.end()) {
      Storage made(
          Storage::use_byte_size_t(), host.nbytes(), hold(host, *device), &allocator,
          /*resizable=*/true);
      known = storages.emplace(impl, made).first;
    }
    return known->second;
  }

  // A kernel may have resized its host tensors, or set them on another storage.
  void follow_hosts() {
    for (auto& [host, storage] : storages) follow_storage(host, storage);
    for (auto& [tensor, host] : pairs) {
      auto* impl = tensor.unsafeGetTensorImpl();
      const auto& storage = device_storage(host.storage());
      if (!storage.is_alias_of(tensor.storage())) impl->set_storage_keep_dtype(storage);
      if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides() ||
          host.storage_offset() != tensor.storage_offset()) {
        impl->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  static void follow_storage(StorageImpl* host, const Storage& storage) {
    follow(storage, Storage(c10::intrusive_ptr<StorageImpl>::reclaim_copy(host)));
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [tensor, known] : pairs) {
      if (known.is_same(host)) return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        host.layout() == at::kStrided && host.device() == c10::kCPU,
        op.operator_name(), ": the pretended device has dense tensors only");
    return alike(host, device_storage(host.storage()), c10::DispatchKey::PrivateUse1);
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const auto& host : value.toTensorVector()) made.push_back(to_device(host));
      return made;
    }
    return value;
  }
};

void run_on_host(const OperatorHandle& op, Stack* stack) {
  Call call{op};
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  bool generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    value = call.to_host(value, arguments[i]);
  }
  call.check_devices();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    auto drawn = call.with_generator(value, arguments[i]);
    generator |= drawn.isGenerator();
    value = drawn;
  }
  {
    std::optional<LendDefault> lent;
    if (!generator && op.hasTag(at::Tag::nondeterministic_seeded)) lent.emplace();
    c10::impl::ExcludeDispatchKeyGuard below(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op.redispatchBoxed(DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.follow_hosts();
  auto results = op.schema().returns().size();
  for (auto i = stack->size() - results; i < stack->size(); ++i) {
    (*stack)[i] = call.to_device((*stack)[i]);
  }
}

Tensor host_or_cpu(const Tensor& tensor) {
  return tensor.device().type() == TYPE ? host_view(tensor) : tensor;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  host_or_cpu(to).copy_(host_or_cpu(from), non_blocking);
  return to;
}

int64_t sdpa_choice(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool gqa) {
  std::optional<Tensor> host_mask;
  if (mask && mask->defined()) host_mask = host_or_cpu(*mask);
  return at::_fused_sdp_choice(
      host_or_cpu(query), host_or_cpu(key), host_or_cpu(value), host_mask, dropout,
      causal, scale, gqa);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// The copy resolves lazy views itself; torch would copy them first, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Where torch would compose what the CPU has a kernel for, take the kernel: its bits.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    auto has = [&op](c10::DispatchKey key) {
      return op->hasSchema() && op->hasKernelForDispatchKey(key);
    };
    if (has(c10::DispatchKey::CPU) &&
        (has(c10::DispatchKey::CompositeExplicitAutograd) ||
         has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         has(c10::DispatchKey::CompositeImplicitAutograd))) {
      m.impl(
          c10::toString(name).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", [](Tensor& /*self*/, c10::Stream /*stream*/) {});
}

// torch starts the threads at the first backward pass of a process, and not again in
// its forks: without this a fork would have none.
struct Engine : torch::autograd::Engine {
  static void start_threads() {
    auto& engine = get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*(&Engine::device_ready_queues_)).empty()) {
      (engine.*(&Engine::start_device_threads))();
    }
  }
};

TORCH_LIBRARY(xtrain_pretended, m) {
  m.def("start_threads() -> ()", &Engine::start_threads);
  m.def("host_view(Tensor(a) tensor) -> Tensor(a)");
  m.def("default_generator(int index) -> Generator?", [](int64_t index) {
    return default_generator(static_cast<c10::DeviceIndex>(index));
  });
}

TORCH_LIBRARY_IMPL(xtrain_pretended, PrivateUse1, m) {
  m.impl("host_view", &host_view);
}

// -- autocast -------------------------------------------------------------------------

// Casts what a GPU's autocast would, to one dtype for all.
template <typename ToDtype>
void cast_all(const OperatorHandle& op, Stack* stack, ToDtype to_dtype) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  auto first = stack->size() - op.schema().arguments().size();
  auto dtype = to_dtype(c10::ArrayRef<IValue>(*stack).slice(first));
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), TYPE);
    } else if (value.isTensorList()) {
      value = at::autocast::cached_cast(dtype, value.toTensorVector(), TYPE);
    }
  }
  op.callBoxed(stack);
}

void to_lower(const OperatorHandle& op, Stack* stack) {
  cast_all(op, stack, [](auto) { return at::autocast::get_lower_precision_fp_from_device_type(TYPE); });
}

void to_float32(const OperatorHandle& op, Stack* stack) {
  cast_all(op, stack, [](auto) { return at::kFloat; });
}

void to_widest(const OperatorHandle& op, Stack* stack) {
  cast_all(op, stack, [](c10::ArrayRef<IValue> values) {
    auto dtype = at::autocast::get_lower_precision_fp_from_device_type(TYPE);
    for (const auto& value : values) {
      if (value.isTensor()) {
        dtype = at::autocast::prioritize(dtype, value.toTensor(), TYPE);
      } else if (value.isTensorList()) {
        dtype = at::autocast::prioritize(dtype, value.toTensorVector(), TYPE);
      }
    }
    return dtype;
  });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define NAME1(OP) "aten::" #OP
#define NAME2(OP, OVERLOAD) "aten::" #OP "." #OVERLOAD
#define PICK(_1, _2, N, ...) N
#define OP_NAME(...) PICK(__VA_ARGS__, NAME2, NAME1, )(__VA_ARGS__)
#define LOWER(...) \
  m.impl(OP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&to_lower>());
#define FLOAT(...) \
  m.impl(OP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&to_float32>());
#define WIDEST(...) \
  m.impl(OP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&to_widest>());
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT)
  FLOAT(norm, Scalar)
  FLOAT(norm, ScalarOpt_dim)
  AT_FORALL_PROMOTE(WIDEST)
}

// -- what torch asks a device ---------------------------------------------------------

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(0 <= index && index < DEVICES, "invalid device ordinal ", index);
    return std::exchange(current, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  Device getDeviceFromPtr(void*) const override { return {TYPE, current}; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto host = host_storage(storage);
    at::native::resize_bytes_cpu(host.unsafeGetStorageImpl(), bytes);
    follow(storage, host);
  }
};

// Every kernel ends before its call returns, so streams and events order nothing.
struct Guard : c10::impl::NoOpDeviceGuardImpl<TYPE> {
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {TYPE, current}; }
  void setDevice(Device device) const override {
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return getStream(stream.device());
  }
  void record(
      void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&sdpa_choice);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
