// The backward pass asks torch's CUDA hooks which GPUs have a context, and that question needs a driver. This library answers
// it: none has. It replaces one entry of the hooks' table of virtual functions by a copy of the table (Itanium ABI: a pointer
// to a virtual member is 1 + its offset in the table).
#include <ATen/detail/CUDAHooksInterface.h>
#include <cstring>

static bool answer_none(const void*, c10::DeviceIndex) { return false; }

extern "C" void no_context() {
  auto& hooks = at::detail::getCUDAHooks();
  bool (at::AcceleratorHooksInterface::*member)(c10::DeviceIndex) const =
      &at::AcceleratorHooksInterface::hasPrimaryContext;
  ptrdiff_t offset;
  std::memcpy(&offset, &member, sizeof(offset));
  auto*& table = *reinterpret_cast<void***>(const_cast<at::CUDAHooksInterface*>(&hooks));
  constexpr size_t entries_before = 2;  // the offset to the top and the type information
  constexpr size_t entries = 96;        // at least as many as the hooks have
  auto* copy = new void*[entries_before + entries];
  std::memcpy(copy, table - entries_before, (entries_before + entries) * sizeof(void*));
  copy[entries_before + (offset - 1) / sizeof(void*)] = reinterpret_cast<void*>(&answer_none);
  table = copy + entries_before;
}
