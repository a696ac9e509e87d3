#include "linear_run.h"

#include <algorithm>

#include "cpu.h"

namespace jaxinfer {
namespace {

// Rows whose results wait in the first-level cache while a slice of a tile meets all of them.
constexpr int64_t kBlockRows = 126;
// Chunks per thread: enough to level out threads that start late or share their core.
constexpr int64_t kChunksPerThread = 8;
// Below this, waking a thread takes longer than the work.
constexpr int64_t kSerialBytes = 64 * 1024;
constexpr int64_t kSerialRows = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// [0, total) in `count` ranges of nearly equal size: where range i begins.
int64_t cut(int64_t total, int64_t count, int64_t i) { return total / count * i + std::min(i, total % count); }

struct Prepared {
  int preparation;
  std::vector<PreparedGroup> groups;
};

// Activations for one kind of formats. `memory` belongs to the calling thread and outlives the call.
Prepared prepare(const LinearKernels& kernels, Parallel& parallel, const LinearCall& call, int format,
                 std::vector<float>& memory) {
  const FormatInfo info = kernels.info(format);
  const int64_t units = ceil_div(call.inputs, info.unit), padded = units * info.unit, blocks = padded / info.block;
  const int64_t count = ceil_div(call.rows, kernels.max_rows);
  const int64_t row_floats = padded * kernels.input_bytes / 4, row_sums = blocks * kernels.block_floats;
  const size_t need = static_cast<size_t>(call.rows * (row_floats + row_sums));
  if (memory.size() < need) memory.resize(need);
  float* const sums = memory.data() + call.rows * row_floats;
  Prepared result{info.preparation, std::vector<PreparedGroup>(static_cast<size_t>(count))};
  const int64_t row_bytes = call.inputs * (call.x_dtype == Float::kF32 ? 4 : 2);
  const int64_t chunks = call.rows * padded * 4 < kSerialBytes ? 1 : std::min(count, kChunksPerThread * parallel.threads());
  parallel.each(chunks, [&](int64_t chunk) {
    for (int64_t g = cut(count, chunks, chunk); g < cut(count, chunks, chunk + 1); ++g) {
      const int64_t row = cut(call.rows, count, g);
      const int rows = static_cast<int>(cut(call.rows, count, g + 1) - row);
      float* const x = memory.data() + row * row_floats;
      kernels.prepare(format, static_cast<const char*>(call.x) + row * row_bytes, call.x_dtype, rows, call.inputs, units,
                      x, sums + row * row_sums);
      result.groups[static_cast<size_t>(g)] = {x, sums + row * row_sums, rows};
    }
  });
  return result;
}

// A part with what a tile of it needs.
struct PlannedPart {
  LinearPart part;
  const Prepared* prepared;
  int64_t units;
  int64_t tile_bytes;
  int64_t first_tile;    // among the tiles of all parts
  int64_t first_output;  // among the outputs of all parts
};

void run_tile(const LinearKernels& kernels, const LinearCall& call, const PlannedPart& planned, int64_t tile,
              int64_t first_group, int64_t groups, int64_t outputs, float* y_scratch) {
  const int64_t in_part = tile - planned.first_tile, column = planned.first_output + in_part * kTileOutputs;
  const PreparedGroup* group = planned.prepared->groups.data() + first_group;
  const int64_t row = cut(call.rows, static_cast<int64_t>(planned.prepared->groups.size()), first_group);
  const int64_t item = call.y_dtype == Float::kF32 ? 4 : 2;
  TileOutput out;
  out.y = static_cast<char*>(call.y) + (row * outputs + column) * item;
  out.row_stride = outputs;
  out.outputs = std::min(kTileOutputs, planned.part.outputs - in_part * kTileOutputs);
  out.dtype = call.y_dtype;
  out.bias = call.bias == nullptr ? nullptr : call.bias + column;
  kernels.tile(planned.part.format, planned.part.data + in_part * planned.tile_bytes, planned.units, group, groups,
               y_scratch, out);
}

}  // namespace

const LinearKernels& linear_kernels() {
  return cpu_level() == Level::kV4 ? v4::linear_kernels() : v3::linear_kernels();
}

const LinearKernels& linear_int8_kernels() {
  return cpu_level() == Level::kV4 ? v4::linear_int8_kernels() : v3::linear_int8_kernels();
}

const LinearKernels& linear_bf16_kernels() {
  return cpu_level() == Level::kV4 ? v4::linear_bf16_kernels() : v3::linear_bf16_kernels();
}

bool serves(const LinearKernels& kernels, const std::vector<LinearPart>& parts) {
  return std::all_of(parts.begin(), parts.end(), [&](const LinearPart& part) {
    return kernels.first_format <= part.format && part.format < kernels.formats;
  });
}

int64_t part_bytes(const LinearKernels& kernels, int format, int64_t outputs, int64_t inputs) {
  const FormatInfo info = kernels.info(format);
  return ceil_div(outputs, kTileOutputs) * ceil_div(inputs, info.unit) * info.unit_bytes;
}

void linear_run(const LinearKernels& kernels, Parallel& parallel, const LinearCall& call) {
  // At most 6 kinds of preparation; the memory is kept from call to call.
  static thread_local std::vector<float> memories[6];
  std::vector<Prepared> prepared;
  prepared.reserve(6);
  std::vector<PlannedPart> plan;
  int64_t tiles = 0, outputs = 0, bytes = 0;
  if (call.rows == 0) return;
  for (const LinearPart& part : call.parts) {
    const FormatInfo info = kernels.info(part.format);
    auto found = std::find_if(prepared.begin(), prepared.end(),
                              [&](const Prepared& p) { return p.preparation == info.preparation; });
    if (found == prepared.end()) {
      prepared.push_back(prepare(kernels, parallel, call, part.format, memories[prepared.size()]));
      found = prepared.end() - 1;
    }
    const int64_t units = ceil_div(call.inputs, info.unit);
    plan.push_back({part, &*found, units, units * info.unit_bytes, tiles, outputs});
    tiles += ceil_div(part.outputs, kTileOutputs);
    outputs += part.outputs;
    bytes += part_bytes(kernels, part.format, part.outputs, call.inputs);
  }
  const int64_t groups = ceil_div(call.rows, kernels.max_rows);
  const int64_t blocks = ceil_div(groups, kBlockRows / kernels.max_rows);
  const int64_t wanted = bytes * groups < kSerialBytes ? 1 : kChunksPerThread * parallel.threads();
  const int64_t runs = std::max<int64_t>(1, std::min(tiles, ceil_div(wanted, blocks)));
  parallel.each(runs * blocks, [&](int64_t chunk) {
    const int64_t run = chunk / blocks, block = chunk % blocks;
    const int64_t first_group = cut(groups, blocks, block), count = cut(groups, blocks, block + 1) - first_group;
    alignas(64) float y_scratch[kBlockRows * kTileOutputs];
    size_t part = 0;
    for (int64_t tile = cut(tiles, runs, run); tile < cut(tiles, runs, run + 1); ++tile) {
      while (part + 1 < plan.size() && plan[part + 1].first_tile <= tile) ++part;
      run_tile(kernels, call, plan[part], tile, first_group, count, outputs, y_scratch);
    }
  });
}

void rows_run(const LinearKernels& kernels, Parallel& parallel, const RowsCall& call) {
  int64_t outputs = 0;
  for (const LinearPart& part : call.parts) outputs += part.outputs;
  const int64_t row_bytes = call.inputs * (call.y_dtype == Float::kF32 ? 4 : 2);
  const int64_t chunks = call.rows < kSerialRows ? 1 : std::min(call.rows, kChunksPerThread * parallel.threads());
  parallel.each(chunks, [&](int64_t chunk) {
    for (int64_t i = cut(call.rows, chunks, chunk); i < cut(call.rows, chunks, chunk + 1); ++i) {
      int64_t output = std::clamp<int64_t>(call.ids[i], 0, outputs - 1);
      const LinearPart* part = call.parts.data();
      while (output >= part->outputs) output -= (part++)->outputs;
      const int64_t tile_bytes = part_bytes(kernels, part->format, kTileOutputs, call.inputs);
      kernels.row(part->format, part->data + output / kTileOutputs * tile_bytes, static_cast<int>(output % kTileOutputs),
                  call.inputs, static_cast<char*>(call.y) + i * row_bytes, call.y_dtype);
    }
  });
}

}  // namespace jaxinfer
