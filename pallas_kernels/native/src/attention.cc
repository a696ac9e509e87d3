// Ragged paged attention as a call of XLA.
#include "attention.h"

#include "attention_plan.h"
#include "buffers.h"
#include "cpu.h"
#include "helpers.h"
#include "workers.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

// Less work than this is not worth waking threads for.
constexpr double FEW_OPERATIONS = 1 << 18;

void run_attention(const Attention& a, Parallel& parallel) {
  AttentionKernels kernels = cpu_level() == Level::kV4 ? v4::attention_kernels() : v3::attention_kernels();
  AttentionPlan plan = plan_attention(a);
  int64_t row_bytes = a.H * a.h * bytes_of(a.activations), last = start_of(a, a.R);
  std::memset(static_cast<char*>(a.out_THh) + last * row_bytes, 0, (a.T - last) * row_bytes);
  int64_t floats = kernels.scratch_floats(a), n = plan.pieces.size();
  auto attend = [&](int64_t i) {
    FlushSubnormal flush;
    kernels.attend(a, plan.pieces[n - 1 - i], scratch(floats));  // the last tiles have the longest contexts: they go first
  };
  if (plan.operations < FEW_OPERATIONS) {
    for (int64_t i = 0; i < n; i++) attend(i);
  } else {
    parallel.each(n, attend);
  }
  FlushSubnormal flush;
  for (auto [first, count] : plan.merges) kernels.merge(a, &plan.pieces[first], count);
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> context_len,
                     ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
                     ffi::Buffer<ffi::S32> ancestors, ffi::Result<ffi::AnyBuffer> out, float scale, float soft_cap,
                     int64_t window) {
  auto q_dims = q.dimensions(), k_dims = k.dimensions(), table_dims = table.dimensions();
  auto activations = stored_type(q.element_type()), stored = stored_type(k.element_type());
  if (!activations || bytes_of(*activations) < 2 || !stored || k.element_type() != v.element_type())
    return ffi::Error::InvalidArgument("attention: the dtypes of the queries or of the KV cache are not supported");
  Attention a = {};
  a.T = q_dims[0], a.H = q_dims[1], a.h = q_dims[2];
  a.N = k_dims[0], a.K = k_dims[1], a.S = k_dims[2];
  a.R = table_dims[0], a.M = table_dims[1];
  a.activations = *activations, a.pool = *stored;
  a.q_THh = q.untyped_data(), a.k_NKSh = k.untyped_data(), a.v_NKSh = v.untyped_data();
  a.out_THh = out->untyped_data();
  a.table_RM = table.typed_data(), a.query_start_Q = query_start.typed_data();
  a.context_len_R = context_len.typed_data(), a.ancestors_TU = present(ancestors);
  a.U = a.ancestors_TU ? ancestors.dimensions()[1] : 0;
  a.sinks_H = present(sinks), a.k_scale_K = present(k_scale), a.v_scale_K = present(v_scale);
  a.scale = scale, a.soft_cap = soft_cap, a.window = window;
  HelpedParallel parallel(pool.num_threads());
  run_attention(a, parallel);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

}  // namespace jaxinfer
