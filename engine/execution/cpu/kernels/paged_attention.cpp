// Attention of short rows over keys and values in their blocks; see paged_attention.py.
//
// A token's output does not depend on other rows, on its row's number of tokens, on the width of the block table or on
// masked places: sums run over places in order, and masked places add zero.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
// Queries per pass over the keys; their scores are kept in a buffer.
constexpr int64_t kQueries = 32;
// Queries per loading of keys or values to vector registers, of which AVX2 has 16 and AVX-512 has 32.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kTile = 4;
#else
constexpr int kTile = 8;
#endif
// Minimum number of products per thread.
constexpr int64_t kShare = 1 << 21;
constexpr float kUnseen = -std::numeric_limits<float>::infinity();
// Weights below exp(kLeast) are zero, because exp_u20 computes smaller ones differently on some CPUs.
constexpr float kLeast = -87.0f;

struct Sizes {
  int64_t rows, length, heads, kv_heads, dim, block, width;
};

// The keys and values of one head that a row attends to.
struct Seen {
  const float* keys;
  const float* values;
  const int64_t* blocks;
  int64_t num_blocks, block, stride, dim;

  int64_t places() const {
    return num_blocks * block;
  }
  const float* key(int64_t index) const {
    return keys + blocks[index] * block * stride;
  }
  const float* value(int64_t index) const {
    return values + blocks[index] * block * stride;
  }
};

struct Query {
  const float* query;
  const float* mask;
  float* output;
  float* scores;
};

// Call `run` for tiles of N queries, then for the rest; a tile's size is known at compile time.
template <int N, typename Run>
void in_tiles(Query* first, const Query* end, const Run& run) {
  for (; end - first >= N; first += N) {
    run(std::integral_constant<int, N>(), first);
  }
  if constexpr (N > 1) {
    in_tiles<N - 1>(first, end, run);
  }
}

// Compute the scores of `count` transposed keys [dim][lanes] from `place` on. Two sums shorten the chain of additions.
template <int N>
void score(const Query* queries, const Vec* keys, int64_t dim, float scale, int64_t place, int64_t count) {
  Vec even[N], odd[N];
  for (int n = 0; n < N; ++n) {
    even[n] = odd[n] = Vec(0.0f);
  }
  for (int64_t d = 0; d < dim; d += 2) {
    for (int n = 0; n < N; ++n) {
      even[n] = at::vec::fmadd(Vec(queries[n].query[d]), keys[d], even[n]);
      odd[n] = at::vec::fmadd(Vec(queries[n].query[d + 1]), keys[d + 1], odd[n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    const Vec mask = Vec::loadu(queries[n].mask + place, count);
    at::vec::fmadd(even[n] + odd[n], Vec(scale), mask).store(queries[n].scores + place, count);
  }
}

// Compute weights from scores minus the highest score. N registers at once hide the latency of exp.
template <int N>
void weigh(Vec (&below)[N]) {
  const Vec least(kLeast), zero(0.0f);
  Vec weights[N];
  for (int n = 0; n < N; ++n) {
    weights[n] = Vec::blendv(least, below[n], below[n] > least);
  }
  for (int n = 0; n < N; ++n) {
    weights[n] = weights[n].exp_u20();
  }
  for (int n = 0; n < N; ++n) {
    below[n] = Vec::blendv(zero, weights[n], below[n] > least);
  }
}

// Replace scores by weights, which are all zero if every place is masked.
void soften(float* scores, int64_t places) {
  Vec highest(kUnseen);
  for (int64_t i = 0; i < places; i += kLanes) {
    const int64_t count = std::min(kLanes, places - i);
    highest = at::vec::maximum(highest, Vec::set(Vec(kUnseen), Vec::loadu(scores + i, count), count));
  }
  const float top = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, highest);
  if (top == kUnseen) {
    std::fill(scores, scores + places, 0.0f);
    return;
  }
  if (!(top < -kUnseen)) {
    // Propagate NaN and infinity.
    std::fill(scores, scores + places, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  int64_t i = 0;
  for (; i + 2 * kLanes <= places; i += 2 * kLanes) {
    Vec pair[2] = {Vec::loadu(scores + i) - Vec(top), Vec::loadu(scores + i + kLanes) - Vec(top)};
    weigh(pair);
    pair[0].store(scores + i);
    pair[1].store(scores + i + kLanes);
  }
  for (; i < places; i += kLanes) {
    const int64_t count = std::min(kLanes, places - i);
    Vec one[1] = {Vec::loadu(scores + i, count) - Vec(top)};
    weigh(one);
    one[0].store(scores + i, count);
  }
}

// Compute D registers of output dimensions from `at` on.
template <int N, int D>
void mix(const Query* queries, const Seen& seen, int64_t at) {
  Vec sums[N][D], totals[N];
  for (int n = 0; n < N; ++n) {
    totals[n] = Vec(0.0f);
    for (int d = 0; d < D; ++d) {
      sums[n][d] = Vec(0.0f);
    }
  }
  for (int64_t index = 0, place = 0; index < seen.num_blocks; ++index) {
    const float* value = seen.value(index) + at;
    for (int64_t j = 0; j < seen.block; ++j, ++place, value += seen.stride) {
      Vec parts[D];
      for (int d = 0; d < D; ++d) {
        parts[d] = Vec::loadu(value + d * kLanes);
      }
      for (int n = 0; n < N; ++n) {
        const Vec weight(queries[n].scores[place]);
        totals[n] = totals[n] + weight;
        for (int d = 0; d < D; ++d) {
          sums[n][d] = at::vec::fmadd(weight, parts[d], sums[n][d]);
        }
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    // The highest weight is 1, so a total below 1 means that every place is masked and all sums are zero.
    const Vec total = at::vec::maximum(totals[n], Vec(1.0f));
    for (int d = 0; d < D; ++d) {
      (sums[n][d] / total).store(queries[n].output + at + d * kLanes);
    }
  }
}

// Transpose `count` keys to [dim][lanes].
void transpose(const float* keys, int64_t stride, int64_t count, int64_t dim, float* output) {
  if (count < kLanes) {
    return at::vec::transpose_mxn<float>(keys, stride, output, kLanes, count, dim);
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    at::vec::transpose_mxn<float, kLanes, kLanes>(keys + d, stride, output + d * kLanes, kLanes);
  }
}

// Grow a buffer to at least `count` floats, aligned to vector registers.
float* reserve(std::vector<Vec>& buffer, int64_t count) {
  buffer.resize(std::max<size_t>(buffer.size(), (count + kLanes - 1) / kLanes));
  return reinterpret_cast<float*>(buffer.data());
}

void attend(std::vector<Query>& queries, const Seen& seen, float scale) {
  static thread_local std::vector<Vec> buffer, keys;
  float* scores = reserve(buffer, queries.size() * seen.places());
  float* transposed = reserve(keys, seen.dim * kLanes);
  for (size_t i = 0; i < queries.size(); ++i) {
    queries[i].scores = scores + i * seen.places();
  }
  for (int64_t index = 0; index < seen.num_blocks; ++index) {
    for (int64_t j = 0; j < seen.block; j += kLanes) {
      const int64_t count = std::min(kLanes, seen.block - j);
      const float* key = seen.key(index) + j * seen.stride;
      transpose(key, seen.stride, count, seen.dim, transposed);
      in_tiles<kTile>(queries.data(), queries.data() + queries.size(), [&](auto size, const Query* tile) {
        score<size>(tile, keys.data(), seen.dim, scale, index * seen.block + j, count);
      });
    }
  }
  for (Query& query : queries) {
    soften(query.scores, seen.places());
  }
  in_tiles<kTile>(queries.data(), queries.data() + queries.size(), [&](auto size, const Query* tile) {
    int64_t at = 0;
    for (; at + 2 * kLanes <= seen.dim; at += 2 * kLanes) {
      mix<size, 2>(tile, seen, at);
    }
    for (; at < seen.dim; at += kLanes) {
      mix<size, 1>(tile, seen, at);
    }
  });
}

struct Tensors {
  const float* query;
  const int64_t* query_strides;
  const float* keys;
  const float* values;
  const int64_t* blocks;
  const int64_t* ends;
  const float* mask;
  float* output;
};

// Attend up to kQueries of the copies * length queries of one row and one kv head, from `first` on.
void attend_some(const Tensors& tensors, const Sizes& sizes, float scale, int64_t row, int64_t kv_head, int64_t first) {
  static thread_local std::vector<Query> queries;
  queries.clear();
  const int64_t copies = sizes.heads / sizes.kv_heads, context = sizes.width * sizes.block;
  int64_t end = 0;
  for (int64_t i = first; i < std::min(first + kQueries, copies * sizes.length); ++i) {
    const int64_t token = row * sizes.length + i / copies, head = kv_head * copies + i % copies;
    end = std::max(end, tensors.ends[token]);
    queries.push_back({
        tensors.query + token * tensors.query_strides[0] + head * tensors.query_strides[1],
        tensors.mask + token * context,
        tensors.output + (token * sizes.heads + head) * sizes.dim,
    });
  }
  const Seen seen{
      tensors.keys + kv_head * sizes.dim,
      tensors.values + kv_head * sizes.dim,
      tensors.blocks + row * sizes.width,
      std::min((end + sizes.block - 1) / sizes.block, sizes.width),
      sizes.block,
      sizes.kv_heads * sizes.dim,
      sizes.dim,
  };
  attend(queries, seen, scale);
}

void attend_all(const Tensors& tensors, const Sizes& sizes, float scale) {
  const int64_t chunks = (sizes.heads / sizes.kv_heads * sizes.length + kQueries - 1) / kQueries;
  const int64_t count = sizes.rows * sizes.kv_heads * chunks;
  const int64_t products = 2 * sizes.rows * sizes.length * sizes.heads * sizes.dim * sizes.width * sizes.block;
  const int64_t grain = std::max<int64_t>(1, kShare * count / std::max<int64_t>(1, products));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / chunks;
      attend_some(tensors, sizes, scale, head / sizes.kv_heads, head % sizes.kv_heads, i % chunks * kQueries);
    }
  });
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_paged_attention(
    AtenTensorHandle query,
    AtenTensorHandle keys,
    AtenTensorHandle values,
    AtenTensorHandle blocks,
    AtenTensorHandle ends,
    AtenTensorHandle mask,
    double scale,
    AtenTensorHandle* output) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const at::Tensor& queries = *tensor_handle_to_tensor_pointer(query);
    const at::Tensor& cache = *tensor_handle_to_tensor_pointer(keys);
    const at::Tensor& table = *tensor_handle_to_tensor_pointer(blocks);
    at::Tensor outputs = at::empty(queries.sizes(), queries.options());
    const Sizes sizes{
        table.size(0),
        queries.size(0) / table.size(0),
        queries.size(1),
        cache.size(2),
        cache.size(3),
        cache.size(1),
        table.size(1),
    };
    const Tensors tensors{
        queries.const_data_ptr<float>(),
        queries.strides().data(),
        cache.const_data_ptr<float>(),
        tensor_handle_to_tensor_pointer(values)->const_data_ptr<float>(),
        table.const_data_ptr<int64_t>(),
        tensor_handle_to_tensor_pointer(ends)->const_data_ptr<int64_t>(),
        tensor_handle_to_tensor_pointer(mask)->const_data_ptr<float>(),
        outputs.mutable_data_ptr<float>(),
    };
    attend_all(tensors, sizes, static_cast<float>(scale));
    *output = new_tensor_handle(std::move(outputs));
  });
}
