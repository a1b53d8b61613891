// The CPU's kernels: packed linears, norms, rotary embedding, paged attention, sampling.
//
// A plain C interface that ctypes calls (native_ops.py holds the other side). Everything is
// templated on the element type, bf16 or float. A row of elements is read as 32-bit words: a word
// holds two bf16 or one float, and one multiply-add takes 16 words times one broadcast word. So one
// set of loops serves both types.
//
// Determinism: a result is summed in an order that depends on its own row alone, never on the
// other rows, the threads or the chunks a prompt was cut into.

#include "gguf.h"
#include "vectors.h"

namespace {

// ---- The one matrix product ---------------------------------------------------------------------

// acc[r][v] += sum over k of a[r][word k] * (16 words of b[v] at k * b_step), in order of k.
// Meanwhile what lies at the same places of `ahead`, where given, is brought into the cache.
template <class T, int ROWS, int VECS>
[[gnu::always_inline]] inline void multiply(Vec (&acc)[ROWS][VECS], const T* a, int64_t a_stride,
                                            const uint32_t* const (&b)[VECS], int64_t b_step,
                                            int64_t words,
                                            const uint32_t* const* ahead = nullptr) {
  for (int64_t k = 0; k < words; ++k) {
    Vec column[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      if (ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead[v] + k * b_step), _MM_HINT_T0);
      column[v] = _mm512_loadu_ps(b[v] + k * b_step);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      Vec word = broadcast_word(a + r * a_stride + k * PER_WORD<T>);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) acc[r][v] = multiply_add<T>(acc[r][v], column[v], word);
    }
  }
}

template <int ROWS, int VECS>
[[gnu::always_inline]] inline void clear(Vec (&acc)[ROWS][VECS]) {
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) acc[r][v] = _mm512_setzero_ps();
}

// ---- Linear -------------------------------------------------------------------------------------
//
// A packed weight is a list of panels of 32 output columns; a panel holds, for each word of the
// input, the 32 columns' words: [out / 32][words][32]. So a thread reads one stream at one row,
// and at many rows a panel stays in the L2 cache while tiles of up to 12 rows pass over it.

constexpr int PANEL = 32;
constexpr int MAX_TILE = 12;
constexpr int64_t BLOCK_BYTES = 384 << 10;  // of x, beside a panel in L2

// Rows [begin, end) of x, at most 12, times panel p of a packed weight.
template <class T, class Out>
[[gnu::always_inline]] inline void multiply_panel(const T* x, int64_t x_stride, int64_t begin,
                                                  int64_t end, const uint32_t* packed, int64_t p,
                                                  const T* bias, int64_t num_in, int64_t num_out,
                                                  Out* out) {
  const int64_t words = num_in / PER_WORD<T>;
  const int64_t column = p * PANEL, num_columns = std::min<int64_t>(PANEL, num_out - column);
  with_rows<MAX_TILE>(end - begin, [&](auto rows) {
    constexpr int ROWS = rows;
    Vec acc[ROWS][2];
    clear(acc);
    const uint32_t* panel = packed + p * words * PANEL;
    multiply<T>(acc, x + begin * x_stride, x_stride, {panel, panel + LANES}, PANEL, words);
    auto finish = [&](int v, auto lanes) {
      const int64_t at = column + v * LANES;
      const Vec b = bias ? load(bias + at, lanes) : _mm512_setzero_ps();
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r)
        store(out + (begin + r) * num_out + at, _mm512_add_ps(acc[r][v], b), lanes);
    };
    if (num_columns == PANEL) {
      finish(0, All{});
      finish(1, All{});
    } else {
      finish(0, first_lanes(num_columns));
      if (num_columns > LANES) finish(1, first_lanes(num_columns - LANES));
    }
  });
}

template <class T>
int64_t tiles_of_a_block(int64_t num_in) {
  return std::max<int64_t>(1, BLOCK_BYTES / (MAX_TILE * num_in * static_cast<int64_t>(sizeof(T))));
}

template <class T, class Out>
void linear(const T* x, int64_t x_stride, int64_t num_tokens, const uint32_t* packed, const T* bias,
            int64_t num_in, int64_t num_out, Out* out) {
  const int64_t num_panels = (num_out + PANEL - 1) / PANEL;
  const int64_t num_tiles = (num_tokens + MAX_TILE - 1) / MAX_TILE;
  const int64_t block_tiles = tiles_of_a_block<T>(num_in);
  for (int64_t first_tile = 0; first_tile < num_tiles; first_tile += block_tiles) {
    const int64_t last_tile = std::min(num_tiles, first_tile + block_tiles);
#pragma omp parallel for schedule(dynamic, 3)
    for (int64_t p = 0; p < num_panels; ++p)
      for (int64_t tile = first_tile; tile < last_tile; ++tile)
        multiply_panel(x, x_stride, num_tokens * tile / num_tiles,
                       num_tokens * (tile + 1) / num_tiles, packed, p, bias, num_in, num_out, out);
  }
}

template <class T>
void pack(const T* weight, int64_t num_in, int64_t num_out, uint32_t* packed) {
  const int64_t words = num_in / PER_WORD<T>;
  const int64_t num_panels = (num_out + PANEL - 1) / PANEL;
#pragma omp parallel for
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t c = 0; c < PANEL; ++c) {
      const int64_t column = p * PANEL + c;
      for (int64_t k = 0; k < words; ++k) {
        uint32_t word = 0;
        if (column < num_out) std::memcpy(&word, weight + column * num_in + k * PER_WORD<T>, 4);
        packed[(p * words + k) * PANEL + c] = word;
      }
    }
}

// ---- Norms, activations, rotary embedding -------------------------------------------------------

// Below this many elements a second thread costs more than it saves.
constexpr int64_t NORM_GRAIN = 1 << 14, ACTIVATION_GRAIN = 1 << 13;

// The weight of a norm: of the activations' type, or float32.
struct Weight {
  const void* data;
  bool is_f32;
};

template <class T, class Lanes>
inline Vec load(const Weight& w, int64_t i, Lanes lanes) {
  return w.is_f32 ? load(static_cast<const float*>(w.data) + i, lanes)
                  : load(static_cast<const T*>(w.data) + i, lanes);
}

// T is the type of the activations, of which the weight may be; x and out may be of others.
template <class T, class In, class Out>
inline void norm_row(const In* x, const Weight& weight, int64_t n, float eps, Out* out) {
  Vec sum = _mm512_setzero_ps();
  for_vectors(n, [&](int64_t i, auto lanes) {
    Vec v = load(x + i, lanes);
    sum = _mm512_fmadd_ps(v, v, sum);
  });
  const Vec scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / n + eps));
  for_vectors(n, [&](int64_t i, auto lanes) {
    Vec v = _mm512_mul_ps(load(x + i, lanes), scale);
    store(out + i, _mm512_mul_ps(v, load<T>(weight, i, lanes)), lanes);
  });
}

// residual, where given, becomes residual + x (x may be null) and is what is normed.
template <class T>
void rms_norm(const T* x, int64_t x_stride, float* residual, const Weight& weight,
              int64_t num_rows, int64_t n, float eps, T* out) {
#pragma omp parallel for if (num_rows * n > NORM_GRAIN)
  for (int64_t row = 0; row < num_rows; ++row) {
    if (!residual) {
      norm_row<T>(x + row * x_stride, weight, n, eps, out + row * n);
      continue;
    }
    float* sum = residual + row * n;
    if (x) {
      const T* added = x + row * x_stride;
      for_vectors(n, [&](int64_t i, auto lanes) {
        store(sum + i, _mm512_add_ps(load(added + i, lanes), load(sum + i, lanes)), lanes);
      });
    }
    norm_row<T>(sum, weight, n, eps, out + row * n);
  }
}

enum class Gate : int32_t { SILU, GELU_TANH, SWIGLU_CLAMPED };  // native_ops.py has its twin

template <Gate GATE>
inline Vec gated(Vec gate, Vec up) {
  Vec inner = gate;
  if (GATE == Gate::GELU_TANH) {  // tanh(u) = 2 sigmoid(2 u) - 1
    Vec cubic = _mm512_fmadd_ps(_mm512_mul_ps(gate, gate), _mm512_set1_ps(0.044715f),
                                _mm512_set1_ps(1.0f));
    inner = _mm512_mul_ps(_mm512_mul_ps(gate, cubic), _mm512_set1_ps(2 * 0.7978845608f));
  }
  if (GATE == Gate::SWIGLU_CLAMPED) {  // of NaN, min and max return their second operand
    const Vec limit = _mm512_set1_ps(7.0f);
    gate = _mm512_min_ps(limit, gate);
    up = _mm512_max_ps(_mm512_set1_ps(-7.0f), _mm512_min_ps(limit, up));
    up = _mm512_add_ps(up, _mm512_set1_ps(1.0f));
    inner = _mm512_mul_ps(gate, _mm512_set1_ps(1.702f));
  }
  return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid(inner)), up);
}

template <class T, Gate GATE>
void gated_activation(const T* x, int64_t x_stride, int64_t num_rows, int64_t n, T* out) {
#pragma omp parallel for if (num_rows * n > ACTIVATION_GRAIN)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T *gate = x + row * x_stride, *up = gate + n;
    for_vectors(n, [&](int64_t i, auto lanes) {
      store(out + row * n + i, gated<GATE>(load(gate + i, lanes), load(up + i, lanes)), lanes);
    });
  }
}

template <class T>
void gated_activation(Gate gate, const T* x, int64_t x_stride, int64_t num_rows, int64_t n,
                      T* out) {
  switch (gate) {
    case Gate::SILU: return gated_activation<T, Gate::SILU>(x, x_stride, num_rows, n, out);
    case Gate::GELU_TANH:
      return gated_activation<T, Gate::GELU_TANH>(x, x_stride, num_rows, n, out);
    case Gate::SWIGLU_CLAMPED:
      return gated_activation<T, Gate::SWIGLU_CLAMPED>(x, x_stride, num_rows, n, out);
  }
}

// ---- Experts ------------------------------------------------------------------------------------
//
// A pair is a token and one of its experts. Pairs are sorted by expert; then the rows of one expert
// times one panel of its weights are a task, so that all threads work at any number of tokens and
// experts without tokens cost nothing. A token's parts are summed in the order of its experts.

// native_ops.py has its twin.
struct Experts {
  const uint32_t *gate_up, *down;  // packed weights of one expert after the other
  const void *gate_up_bias, *down_bias;
  int64_t num_experts, hidden, inner;
  Gate gate;
};

static_assert(sizeof(Experts) == 64, "native_ops.py");

inline int64_t packed_words(int64_t num_in, int64_t num_out, int64_t per_word) {
  return (num_out + PANEL - 1) / PANEL * PANEL * (num_in / per_word);
}

struct ExpertRows {
  int64_t expert, begin, end;  // sorted pairs, few enough for the cache
};

// Each run of rows times its expert's weight [num_out, num_in].
template <class T, class Out>
void multiply_experts(const std::vector<ExpertRows>& runs, const T* x, const uint32_t* packed,
                      const T* bias, int64_t num_in, int64_t num_out, Out* out) {
  const int64_t num_panels = (num_out + PANEL - 1) / PANEL;
  const int64_t size = packed_words(num_in, num_out, PER_WORD<T>);
#pragma omp parallel for schedule(dynamic, 3)
  for (int64_t task = 0; task < static_cast<int64_t>(runs.size()) * num_panels; ++task) {
    const ExpertRows& run = runs[task / num_panels];
    const int64_t rows = run.end - run.begin, num_tiles = (rows + MAX_TILE - 1) / MAX_TILE;
    for (int64_t tile = 0; tile < num_tiles; ++tile)
      multiply_panel(x, num_in, run.begin + rows * tile / num_tiles,
                     run.begin + rows * (tile + 1) / num_tiles, packed + run.expert * size,
                     task % num_panels, bias ? bias + run.expert * num_out : nullptr, num_in,
                     num_out, out);
  }
}

template <class T>
void experts(const T* x, int64_t x_stride, int64_t num_tokens, int64_t top_k, const int32_t* ids,
             const float* weights, const Experts& e, T* out) {
  static thread_local std::vector<int64_t> own_starts, own_places;
  static thread_local std::vector<ExpertRows> runs;
  static thread_local std::vector<T> own_rows, wide, narrow;
  static thread_local std::vector<float> own_parts;
  // The team must see this thread's lists, not its members' own.
  std::vector<int64_t>&starts = own_starts, &places = own_places;
  std::vector<T>& rows = own_rows;
  std::vector<float>& parts = own_parts;
  const int64_t num_pairs = num_tokens * top_k;
  starts.assign(e.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) ++starts[ids[pair] + 1];
  const int64_t most = MAX_TILE * std::min(tiles_of_a_block<T>(e.hidden), tiles_of_a_block<T>(e.inner));
  runs.clear();
  for (int64_t expert = 0; expert < e.num_experts; ++expert) {
    const int64_t begin = starts[expert], end = starts[expert + 1] += begin;
    for (int64_t at = begin; at < end; at += most)
      runs.push_back({expert, at, std::min(end, at + most)});
  }
  places.resize(num_pairs);
  rows.resize(num_pairs * e.hidden);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    places[pair] = starts[ids[pair]]++;
    std::memcpy(rows.data() + places[pair] * e.hidden, x + pair / top_k * x_stride,
                e.hidden * sizeof(T));
  }
  wide.resize(num_pairs * 2 * e.inner);
  narrow.resize(num_pairs * e.inner);
  parts.resize(num_pairs * e.hidden);
  multiply_experts(runs, rows.data(), e.gate_up, static_cast<const T*>(e.gate_up_bias), e.hidden,
                   2 * e.inner, wide.data());
  gated_activation(e.gate, wide.data(), 2 * e.inner, num_pairs, e.inner, narrow.data());
  multiply_experts(runs, narrow.data(), e.down, static_cast<const T*>(e.down_bias), e.inner,
                   e.hidden, parts.data());
#pragma omp parallel for if (num_pairs * e.hidden > ACTIVATION_GRAIN)
  for (int64_t token = 0; token < num_tokens; ++token)
    for_vectors(e.hidden, [&](int64_t i, auto lanes) {
      Vec sum = _mm512_setzero_ps();
      for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair)
        sum = _mm512_fmadd_ps(load(parts.data() + places[pair] * e.hidden + i, lanes),
                              _mm512_set1_ps(weights[pair]), sum);
      store(out + token * e.hidden + i, sum, lanes);
    });
}

constexpr int MAX_HEAD_DIM = 512;

struct RopeTable {
  const float* cos_sin;  // [max_positions, rotary_dim], null for none
  int64_t rotary_dim;
  int32_t interleaved;
};

inline void rotate(float* x, const RopeTable& rope, int64_t position) {
  const int64_t half = rope.rotary_dim / 2;
  const float *cos = rope.cos_sin + position * rope.rotary_dim, *sin = cos + half;
  if (rope.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for_vectors(half, [&](int64_t i, auto lanes) {
    const Vec a = load(x + i, lanes), b = load(x + half + i, lanes);
    const Vec c = load(cos + i, lanes), s = load(sin + i, lanes);
    store(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), lanes);
    store(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), lanes);
  });
}

// What does not change from call to call of a layer; native_ops.py has its twin.
struct Layer {
  int64_t num_heads, num_kv_heads, head_dim, window;  // window 0 sees all
  float scale, softcap;                               // softcap 0 for none
  const float* sinks;
  RopeTable rope;
  Weight q_norm, k_norm;
  float eps;
};

// ---- The cache ----------------------------------------------------------------------------------
//
// A page of [page_size, num_kv_heads, head_dim] elements, page_size a multiple of 16, is kept in the
// order in which `multiply` reads it, so that attention streams through it: per kv head, keys as
// [page_size / 16][words][16] words (a word is of one token), values as
// [page_size / per word][head_dim] words (a word is of one dimension). Pages of other sizes are kept
// as they are; attention copies their tokens into chunks.

constexpr int CHUNK = LANES;  // tokens

inline bool packs_pages(int64_t page_size) { return page_size % CHUNK == 0; }

// Elements from the pool's first to the first of 16 tokens of a head.
inline int64_t chunk_at(int64_t page, int64_t page_size, int64_t offset, int64_t head,
                        const Layer& layer) {
  return ((page * layer.num_kv_heads + head) * page_size + offset / CHUNK * CHUNK) * layer.head_dim;
}

template <class T>
inline void put_key(T* chunk, int64_t token, const T* key, int64_t dim) {
  for (int64_t w = 0; w < dim / PER_WORD<T>; ++w)
    std::memcpy(chunk + (w * CHUNK + token) * PER_WORD<T>, key + w * PER_WORD<T>, 4);
}

template <class T>
inline void put_value(T* chunk, int64_t token, const T* value, int64_t dim) {
  T* to = chunk + token / PER_WORD<T> * PER_WORD<T> * dim + token % PER_WORD<T>;
  for (int64_t d = 0; d < dim; ++d) to[d * PER_WORD<T>] = value[d];
}

// q is normed and rotated in place; k and v go to the cache.
template <class T>
void write_qkv(T* qkv, int64_t stride, int64_t num_tokens, const int64_t* positions,
               const int64_t* out_slots, int64_t page_size, const Layer& layer, T* k_cache,
               T* v_cache) {
  const int64_t dim = layer.head_dim, num_rotated = layer.num_heads + layer.num_kv_heads;
#pragma omp parallel for if (num_tokens * stride > ACTIVATION_GRAIN)
  for (int64_t token = 0; token < num_tokens; ++token) {
    T* row = qkv + token * stride;
    const int64_t slot = out_slots[token];
    for (int64_t head = 0; head < (slot < 0 ? layer.num_heads : num_rotated); ++head) {
      T* x = row + head * dim;
      float wide[MAX_HEAD_DIM];
      const Weight& norm = head < layer.num_heads ? layer.q_norm : layer.k_norm;
      if (norm.data) {
        norm_row<T>(x, norm, dim, layer.eps, wide);
      } else {
        for_vectors(dim, [&](int64_t i, auto lanes) { store(wide + i, load(x + i, lanes), lanes); });
      }
      if (layer.rope.cos_sin) rotate(wide, layer.rope, positions[token]);
      for_vectors(dim, [&](int64_t i, auto lanes) { store(x + i, load(wide + i, lanes), lanes); });
    }
    if (slot < 0) continue;
    const int64_t page = slot / page_size, offset = slot % page_size;
    const T *k = row + layer.num_heads * dim, *v = row + num_rotated * dim;
    if (!packs_pages(page_size)) {
      const int64_t width = layer.num_kv_heads * dim;
      std::memcpy(k_cache + slot * width, k, width * sizeof(T));
      std::memcpy(v_cache + slot * width, v, width * sizeof(T));
      continue;
    }
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const int64_t at = chunk_at(page, page_size, offset, head, layer);
      put_key(k_cache + at, offset % CHUNK, k + head * dim, dim);
      put_value(v_cache + at, offset % CHUNK, v + head * dim, dim);
    }
  }
}

// ---- Attention ----------------------------------------------------------------------------------
//
// A context is cut into splits of 256 keys at fixed positions. In a split, the query heads that
// share a kv head are the rows of two small products: scores = q k^T, then p v. Splits are merged
// in order, so decode gives the bits that prefill gave, whether a long context's splits ran on one
// thread or on many.

constexpr int SPLIT = 256;
constexpr int GROUP_VECS = 4;  // columns that are computed at once, in vectors
constexpr int ROW_TILE = 6;
constexpr int64_t MAX_QUERY_ROWS = 96;     // of a task with more than one token
constexpr int64_t ATTENTION_GRAIN = 1000;  // keys times kv heads

// Who is in the batch; native_ops.py has its twin.
struct Batch {
  int64_t num_rows, page_size, table_stride;
  const int32_t *qo_indptr, *kv_lens, *slots, *block_table;
  const uint8_t* tree_mask;  // null is causal
};

static_assert(sizeof(Layer) == 112, "native_ops.py");
static_assert(sizeof(Batch) == 64, "native_ops.py");

struct Task {
  int64_t row, kv_head, num_kv_heads;
  int64_t begin, num_tokens;  // new tokens, counted from the row's first
  int64_t mask_begin;         // of the row, in tree_mask
  int64_t split;              // -1: all of them
  float* partial;             // where a single split's state goes
};

// Softmax in progress of a task's query rows, [kv head][token][query head of the kv head].
struct State {
  float *max, *sum, *out;
};

inline State state_at(float* data, int64_t rows) { return {data, data + rows, data + 2 * rows}; }

// The keys that a row may see.
struct Visible {
  int64_t first, last;
  const uint8_t* tree;  // by position, or null
};

// One row's scores of keys from `position` on become probabilities of type T, in place.
template <class T>
void softmax_row(float* scores, int64_t position, int num_keys, const Layer& layer,
                 const Visible& visible, float* max_out, float* sum_out) {
  const Vec scale = _mm512_set1_ps(layer.scale), lowest = _mm512_set1_ps(-INFINITY);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  Vec max = lowest;
  for (int i = 0; i < num_keys; i += LANES) {
    Vec s = _mm512_mul_ps(load(scores + i), scale);
    if (layer.softcap != 0) {
      const Vec cap = _mm512_set1_ps(layer.softcap), two = _mm512_set1_ps(2.0f);
      const Vec t = sigmoid(_mm512_div_ps(_mm512_mul_ps(s, two), cap));
      s = _mm512_mul_ps(cap, _mm512_fmsub_ps(t, two, _mm512_set1_ps(1.0f)));
    }
    const int64_t at = position + i;
    if (at < visible.first || at + LANES - 1 > visible.last || visible.tree) {
      const __m512i low = _mm512_set1_epi32(static_cast<int>(visible.first - at));
      const __m512i high = _mm512_set1_epi32(static_cast<int>(visible.last - at));
      __mmask16 m = _mm512_cmpge_epi32_mask(lanes, low) & _mm512_cmple_epi32_mask(lanes, high);
      if (visible.tree) {
        const __m128i bytes = _mm_maskz_loadu_epi8(m, visible.tree + at);
        m = _mm_test_epi8_mask(bytes, bytes);
      }
      s = _mm512_mask_blend_ps(m, lowest, s);
    }
    store(scores + i, s);
    max = _mm512_max_ps(max, s);
  }
  const float row_max = _mm512_reduce_max_ps(max);
  // Where nothing is visible, every e^(-inf - 0) is 0.
  const Vec shift = _mm512_set1_ps(row_max == -INFINITY ? 0.0f : row_max);
  T* p = reinterpret_cast<T*>(scores);
  Vec sum = _mm512_setzero_ps();
  for (int i = 0; i < num_keys; i += LANES) {
    store(p + i, exponential(_mm512_sub_ps(load(scores + i), shift)));
    sum = _mm512_add_ps(sum, load(p + i));  // as rounded
  }
  *max_out = row_max;
  *sum_out = _mm512_reduce_add_ps(sum);
}

// Joins the softmax of the next split to that of the splits before it.
inline void merge(State& state, const State& next, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (next.max[r] == -INFINITY) continue;
    const float max = std::max(state.max[r], next.max[r]);
    const float a = exponential(state.max[r] - max), b = exponential(next.max[r] - max);
    state.max[r] = max;
    state.sum[r] = state.sum[r] * a + next.sum[r] * b;
    float *to = state.out + r * dim, *from = next.out + r * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec x = _mm512_mul_ps(load(to + d), _mm512_set1_ps(a));
      store(to + d, _mm512_fmadd_ps(load(from + d), _mm512_set1_ps(b), x));
    }
  }
}

template <class T>
class Attention {
 public:
  Attention(const Batch& batch, const Layer& layer, const T* q, int64_t q_stride, const T* k,
            const T* v, T* out)
      : batch_(batch), layer_(layer), q_(q), q_stride_(q_stride), k_(k), v_(v), out_(out),
        group_(layer.num_heads / layer.num_kv_heads), dim_(layer.head_dim),
        words_(layer.head_dim / PER_WORD<T>),
        head_stride_(dim_ * (packs_pages(batch.page_size) ? batch.page_size : SPLIT)) {}

  void run() {
    static thread_local std::vector<Task> own_tasks, own_merges;
    static thread_local std::vector<float> partials;
    // The team must see this thread's lists, not its members' own.
    std::vector<Task>&tasks = own_tasks, &merges = own_merges;
    const int64_t work = plan(tasks, merges, partials);
#pragma omp parallel if (work > ATTENTION_GRAIN && tasks.size() > 1)
    {
      static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks.size(); ++i) compute(tasks[i], scratch);
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < merges.size(); ++i) join(merges[i]);
    }
  }

 private:
  // A thread's working memory, kept from call to call.
  struct Scratch {
    std::vector<uint32_t> queries, last_value;
    std::vector<T> copied_keys, copied_values;
    std::vector<float> scores, state, next;
    const T *keys[SPLIT / CHUNK], *values[SPLIT / CHUNK];  // chunks of the task's first head
  };

  // The first and last split that some of the tokens see.
  std::pair<int64_t, int64_t> splits(int64_t first_position, int64_t last_position) const {
    int64_t first = layer_.window ? std::max<int64_t>(0, first_position - layer_.window + 1) : 0;
    return {first / SPLIT, last_position / SPLIT};
  }

  // Decode rows longer than a split become a task a split, with a merge after them.
  int64_t plan(std::vector<Task>& tasks, std::vector<Task>& merges,
               std::vector<float>& partials) const {
    tasks.clear();
    merges.clear();
    const int64_t tile = std::max<int64_t>(1, MAX_QUERY_ROWS / group_);
    int64_t work = 0, mask_begin = 0, num_floats = 0;
    for (int64_t row = 0; row < batch_.num_rows; ++row) {
      const int64_t q_len = batch_.qo_indptr[row + 1] - batch_.qo_indptr[row];
      const int64_t kv_len = batch_.kv_lens[row];
      if (q_len == 0 || kv_len == 0) continue;
      work += q_len * kv_len * layer_.num_kv_heads;
      const auto [first, last] = splits(kv_len - 1, kv_len - 1);
      // A decode row's kv heads lie side by side: one task where there are rows for all threads.
      const int64_t step = q_len == 1 && batch_.num_rows > 4 ? layer_.num_kv_heads : 1;
      for (int64_t head = 0; head < layer_.num_kv_heads; head += step) {
        const int64_t heads = std::min(step, layer_.num_kv_heads - head);
        if (q_len == 1 && first < last) {
          Task task{row, head, heads, 0, 1, mask_begin, first, nullptr};
          merges.push_back(task);
          for (; task.split <= last; ++task.split) tasks.push_back(task);
          num_floats += (last - first + 1) * state_size(task);
          continue;
        }
        for (int64_t end = q_len; end > 0; end -= tile) {
          const int64_t begin = std::max<int64_t>(0, end - tile);
          tasks.push_back({row, head, heads, begin, end - begin, mask_begin, -1, nullptr});
        }
      }
      mask_begin += q_len * kv_len;
    }
    partials.resize(num_floats);
    float* next = partials.data();
    auto merge_task = merges.begin();
    for (Task& task : tasks)
      if (task.split >= 0) {
        if (merge_task != merges.end() && task.split == merge_task->split)
          (merge_task++)->partial = next;
        task.partial = next;
        next += state_size(task);
      }
    return work;
  }

  void compute(const Task& task, Scratch& scratch) const {
    const int64_t rows = num_rows(task);
    scratch.queries.resize(rows * words_);
    scratch.last_value.resize(dim_);
    scratch.scores.resize(rows * SPLIT);
    scratch.state.resize(state_size(task));
    scratch.next.resize(state_size(task));
    uint32_t* to = scratch.queries.data();
    for (int64_t head = 0; head < task.num_kv_heads; ++head)
      for (int64_t t = 0; t < task.num_tokens; ++t, to += group_ * words_)
        std::memcpy(to, query(task, head, t), group_ * words_ * 4);
    if (task.split >= 0) {
      State state = state_at(task.partial, rows);
      compute_split(task, task.split, state, scratch);
      return;
    }
    State state = state_at(scratch.state.data(), rows), next = state_at(scratch.next.data(), rows);
    const auto [first, last] = splits(position(task, 0), last_key(task));
    compute_split(task, first, state, scratch);
    for (int64_t split = first + 1; split <= last; ++split) {
      compute_split(task, split, next, scratch);
      merge(state, next, rows, dim_);
    }
    finish(task, state);
  }

  void join(const Task& task) const {
    const int64_t rows = num_rows(task);
    const auto [first, last] = splits(position(task, 0), last_key(task));
    State state = state_at(task.partial, rows);
    for (int64_t split = first + 1; split <= last; ++split)
      merge(state, state_at(task.partial + (split - first) * state_size(task), rows), rows, dim_);
    finish(task, state);
  }

  // Softmax and output of the task's query rows over one split.
  void compute_split(const Task& task, int64_t split, State& state, Scratch& scratch) const {
    int64_t begin = split * SPLIT;
    const int64_t end = std::min(begin + SPLIT, last_key(task) + 1);
    if (layer_.window) {  // skip what no row sees, in whole vectors
      const int64_t seen = position(task, 0) - layer_.window + 1;
      begin = std::max(begin, seen & ~int64_t{LANES - 1});
    }
    const int num_keys = static_cast<int>(end - begin);
    find_chunks(task, begin, num_keys, scratch);
    score(task, num_keys, scratch);
    const int64_t head_rows = task.num_tokens * group_;
    for (int64_t r = 0; r < num_rows(task); ++r) {
      const int64_t token = r % head_rows / group_;
      Visible visible{0, position(task, token), nullptr};
      if (layer_.window) visible.first = std::max<int64_t>(0, visible.last - layer_.window + 1);
      if (batch_.tree_mask) {
        visible.last = last_key(task);
        visible.tree = batch_.tree_mask + task.mask_begin + (task.begin + token) * kv_len(task);
      }
      softmax_row<T>(&scratch.scores[r * SPLIT], begin, num_keys, layer_, visible, &state.max[r],
                     &state.sum[r]);
    }
    weigh(task, num_keys, scratch, state.out);
  }

  void find_chunks(const Task& task, int64_t begin, int num_keys, Scratch& scratch) const {
    const int32_t* table = batch_.block_table + batch_.slots[task.row] * batch_.table_stride;
    if (!packs_pages(batch_.page_size)) return copy_chunks(task, table, begin, num_keys, scratch);
    for (int64_t i = 0; i < num_keys; i += CHUNK) {
      const int64_t page = table[(begin + i) / batch_.page_size];
      const int64_t offset = (begin + i) % batch_.page_size;
      const int64_t at = chunk_at(page, batch_.page_size, offset, task.kv_head, layer_);
      scratch.keys[i / CHUNK] = k_ + at;
      scratch.values[i / CHUNK] = v_ + at;
    }
  }

  void copy_chunks(const Task& task, const int32_t* table, int64_t begin, int num_keys,
                   Scratch& scratch) const {
    scratch.copied_keys.resize(task.num_kv_heads * head_stride_);
    scratch.copied_values.resize(task.num_kv_heads * head_stride_);
    for (int64_t i = 0; i < num_keys; ++i) {
      const int64_t slot =
          table[(begin + i) / batch_.page_size] * batch_.page_size + (begin + i) % batch_.page_size;
      const int64_t from = (slot * layer_.num_kv_heads + task.kv_head) * dim_;
      T* keys = &scratch.copied_keys[i / CHUNK * CHUNK * dim_];
      T* values = &scratch.copied_values[i / CHUNK * CHUNK * dim_];
      scratch.keys[i / CHUNK] = keys;
      scratch.values[i / CHUNK] = values;
      for (int64_t head = 0; head < task.num_kv_heads; ++head) {
        put_key(keys + head * head_stride_, i % CHUNK, k_ + from + head * dim_, dim_);
        put_value(values + head * head_stride_, i % CHUNK, v_ + from + head * dim_, dim_);
      }
    }
  }

  // The same chunk of another of the task's heads.
  const uint32_t* of_head(const T* chunk, int64_t head) const {
    return reinterpret_cast<const uint32_t*>(chunk + head * head_stride_);
  }

  // scores[row][key] = q k
  void score(const Task& task, int num_keys, Scratch& scratch) const {
    const int64_t head_rows = task.num_tokens * group_;
    const int num_chunks = (num_keys + CHUNK - 1) / CHUNK;
    for (int first = 0; first < num_chunks;) {
      const bool is_group = first + GROUP_VECS <= num_chunks;
      for (int64_t head = 0; head < task.num_kv_heads; ++head)
        for (int64_t r = 0; r < head_rows; r += ROW_TILE)
          with_rows<ROW_TILE>(head_rows - r, [&](auto rows) {
            if (is_group)
              score_tile<rows, GROUP_VECS>(head, head * head_rows + r, first, scratch);
            else
              score_tile<rows, 1>(head, head * head_rows + r, first, scratch);
          });
      first += is_group ? GROUP_VECS : 1;
    }
  }

  template <int ROWS, int VECS>
  void score_tile(int64_t head, int64_t row, int first, Scratch& scratch) const {
    const uint32_t *keys[VECS], *values[VECS];
    for (int v = 0; v < VECS; ++v) {
      keys[v] = of_head(scratch.keys[first + v], head);
      values[v] = of_head(scratch.values[first + v], head);
    }
    Vec acc[ROWS][VECS];
    clear(acc);
    const T* q = reinterpret_cast<const T*>(&scratch.queries[row * words_]);
    multiply<T>(acc, q, dim_, keys, CHUNK, words_, values);
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECS; ++v)
        store(&scratch.scores[(row + i) * SPLIT + (first + v) * CHUNK], acc[i][v]);
  }

  // out[row] = sum over keys of p[row][key] v[key]
  void weigh(const Task& task, int num_keys, Scratch& scratch, float* out) const {
    const int64_t head_rows = task.num_tokens * group_;
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      if (num_keys % PER_WORD<T>) {  // the last word's other token is not of this context
        const int64_t step = num_keys % CHUNK / PER_WORD<T>;
        const uint32_t* from = of_head(scratch.values[num_keys / CHUNK], head) + step * dim_;
        for (int64_t d = 0; d < dim_; ++d) scratch.last_value[d] = from[d] & 0xFFFF;
      }
      for (int64_t r = 0; r < head_rows; r += ROW_TILE)
        with_rows<ROW_TILE>(head_rows - r, [&](auto rows) {
          const int64_t row = head * head_rows + r;
          int64_t d = 0;
          for (; d + GROUP_VECS * LANES <= dim_; d += GROUP_VECS * LANES)
            weigh_tile<rows, GROUP_VECS>(head, row, d, num_keys, scratch, out);
          for (; d < dim_; d += LANES) weigh_tile<rows, 1>(head, row, d, num_keys, scratch, out);
        });
    }
  }

  template <int ROWS, int VECS>
  void weigh_tile(int64_t head, int64_t row, int64_t d, int num_keys, const Scratch& scratch,
                  float* out) const {
    constexpr int STRIDE = SPLIT * PER_WORD<T>;
    const T* p = reinterpret_cast<const T*>(&scratch.scores[row * SPLIT]);
    Vec acc[ROWS][VECS];
    clear(acc);
    const uint32_t* values[VECS];
    for (int first = 0; first < num_keys; first += CHUNK) {
      const int steps = std::min(CHUNK, num_keys - first) / PER_WORD<T>;
      const uint32_t* chunk = of_head(scratch.values[first / CHUNK], head) + d;
      for (int v = 0; v < VECS; ++v) values[v] = chunk + v * LANES;
      multiply<T>(acc, p + first, STRIDE, values, dim_, steps);
    }
    if (const int rest = num_keys % PER_WORD<T>) {
      for (int v = 0; v < VECS; ++v) values[v] = &scratch.last_value[d + v * LANES];
      multiply<T>(acc, p + num_keys - rest, STRIDE, values, dim_, 1);
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECS; ++v) store(out + (row + i) * dim_ + d + v * LANES, acc[i][v]);
  }

  void finish(const Task& task, const State& state) const {
    const int64_t head_rows = task.num_tokens * group_;
    for (int64_t r = 0; r < num_rows(task); ++r) {
      const int64_t token = r % head_rows / group_;
      const int64_t head = (task.kv_head + r / head_rows) * group_ + r % group_;
      float factor = 1.0f / state.sum[r];
      if (layer_.sinks) {
        const float max = std::max(state.max[r], layer_.sinks[head]);
        const float weight = exponential(state.max[r] - max);
        factor = weight / (state.sum[r] * weight + exponential(layer_.sinks[head] - max));
      }
      T* to = out_ + (first_token(task) + token) * layer_.num_heads * dim_ + head * dim_;
      for (int64_t d = 0; d < dim_; d += LANES)
        store(to + d, _mm512_mul_ps(load(state.out + r * dim_ + d), _mm512_set1_ps(factor)));
    }
  }

  int64_t num_rows(const Task& task) const { return task.num_kv_heads * task.num_tokens * group_; }
  int64_t state_size(const Task& task) const { return num_rows(task) * (dim_ + 2); }
  int64_t kv_len(const Task& task) const { return batch_.kv_lens[task.row]; }
  int64_t first_token(const Task& task) const { return batch_.qo_indptr[task.row] + task.begin; }
  int64_t position(const Task& task, int64_t token) const {
    const int64_t q_len = batch_.qo_indptr[task.row + 1] - batch_.qo_indptr[task.row];
    return kv_len(task) - q_len + task.begin + token;
  }
  int64_t last_key(const Task& task) const {  // that any of the tokens sees
    return batch_.tree_mask ? kv_len(task) - 1 : position(task, task.num_tokens - 1);
  }
  const T* query(const Task& task, int64_t head, int64_t token) const {
    return q_ + (first_token(task) + token) * q_stride_ + (task.kv_head + head) * group_ * dim_;
  }

  const Batch& batch_;
  const Layer& layer_;
  const T* q_;
  int64_t q_stride_;
  const T *k_, *v_;
  T* out_;
  int64_t group_, dim_, words_, head_stride_;
};

// ---- A decoder layer ----------------------------------------------------------------------------

// Panels, or the parts of a GGUF weight (gguf.h).
struct Linear {
  const void* packed;
  const void* bias;
  int64_t num_in, num_out, num_parts;  // no parts: panels
};

// What does not change from call to call; native_ops.py has its twin.
struct DecoderLayer {
  Weight input_norm, attention_out_norm, mlp_norm, mlp_out_norm;
  Linear qkv, out, gate_up, down;
  const Layer* attention;
  float eps;
  int32_t is_gelu;
};

static_assert(sizeof(DecoderLayer) == 240, "native_ops.py");

template <class T>
void apply(const Linear& w, const T* x, int64_t num_tokens, T* out) {
  const T* bias = static_cast<const T*>(w.bias);
  if (w.num_parts)
    gguf::linear(x, w.num_in, num_tokens, static_cast<const gguf::Part*>(w.packed), w.num_parts, bias,
                 w.num_in, w.num_out, out);
  else
    linear(x, w.num_in, num_tokens, static_cast<const uint32_t*>(w.packed), bias, w.num_in,
           w.num_out, out);
}

// The ops one after the other, with the same bits; what it saves is the calls from Python, which
// find the caches full of weights.
template <class T>
void decoder_layer(const T* x, float* residual, int64_t num_tokens, const DecoderLayer& layer,
                   const Batch& batch, const int64_t* positions, const int64_t* out_slots,
                   T* k_cache, T* v_cache, T* out) {
  static thread_local std::vector<T> normed, wide, narrow, attended;
  const int64_t hidden = layer.qkv.num_in, n = num_tokens;
  normed.resize(n * hidden);
  attended.resize(n * layer.out.num_in);
  wide.resize(n * std::max(layer.qkv.num_out, layer.gate_up.num_out));
  narrow.resize(n * layer.down.num_in);
  const float eps = layer.eps;
  rms_norm(x, hidden, residual, layer.input_norm, n, hidden, eps, normed.data());
  apply(layer.qkv, normed.data(), n, wide.data());
  write_qkv(wide.data(), layer.qkv.num_out, n, positions, out_slots, batch.page_size,
            *layer.attention, k_cache, v_cache);
  Attention<T>(batch, *layer.attention, wide.data(), layer.qkv.num_out, k_cache, v_cache,
               attended.data())
      .run();
  apply(layer.out, attended.data(), n, out);
  if (layer.attention_out_norm.data)
    rms_norm(out, hidden, nullptr, layer.attention_out_norm, n, hidden, eps, out);
  rms_norm(out, hidden, residual, layer.mlp_norm, n, hidden, eps, normed.data());
  apply(layer.gate_up, normed.data(), n, wide.data());
  const int64_t inner = layer.down.num_in;
  if (layer.is_gelu)
    gated_activation<T, Gate::GELU_TANH>(wide.data(), 2 * inner, n, inner, narrow.data());
  else
    gated_activation<T, Gate::SILU>(wide.data(), 2 * inner, n, inner, narrow.data());
  apply(layer.down, narrow.data(), n, out);
  if (layer.mlp_out_norm.data)
    rms_norm(out, hidden, nullptr, layer.mlp_out_norm, n, hidden, eps, out);
}

// ---- Sampling -----------------------------------------------------------------------------------
//
// The rules are in ReferenceOps.sample. Nothing sorts a vocabulary: the filters sort only logits
// near the largest, taken by a cutoff that is lowered until enough of them lie above it.

constexpr int64_t CDF_BLOCK = 256;

struct SamplingRow {
  float temperature, top_p, min_p;
  int64_t top_k, seed, position;
};

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline float uniform(int64_t seed, int64_t position) {
  const uint64_t x = mix64(mix64(seed) + (position + 1) * 0x9E3779B97F4A7C15u);
  return static_cast<float>(x >> 40) * 0x1p-24f;
}

inline float max_of(const float* x, int64_t n) {  // a NaN counts as nothing
  Vec max = _mm512_set1_ps(-INFINITY);
  for (int64_t i = 0; i < n; i += LANES)
    max = _mm512_max_ps(_mm512_mask_loadu_ps(max, first_lanes(n - i), x + i), max);
  return _mm512_reduce_max_ps(max);
}

inline int64_t index_of(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += LANES) {
    const __mmask16 m = first_lanes(n - i);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(m, load(x + i, m), _mm512_set1_ps(value), _CMP_EQ_OQ);
    if (hit) return i + __builtin_ctz(hit);
  }
  return 0;
}

// e^((x - max) / temperature)
inline Vec unnormalized(Vec x, float max, float inverse) {
  return exponential(_mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps(max)), _mm512_set1_ps(inverse)));
}

// The lowest logit that top_k, then top_p keep.
float lowest_kept(const float* x, int64_t n, float max, const SamplingRow& row,
                  std::vector<float>& near) {
  const float inverse = 1.0f / row.temperature;
  const bool by_rank = row.top_k < n;
  double total = 0;
  auto mass_above = [&](float cutoff) {
    Vec sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
      const __mmask16 m = first_lanes(n - i);
      const Vec v = load(x + i, m);
      const __mmask16 above = _mm512_mask_cmp_ps_mask(m, v, _mm512_set1_ps(cutoff), _CMP_GE_OQ);
      if (above) sum = _mm512_mask_add_ps(sum, above, sum, unnormalized(v, max, inverse));
    }
    return static_cast<double>(_mm512_reduce_add_ps(sum));
  };
  auto count_above = [&](float cutoff) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const __mmask16 m = first_lanes(n - i);
      count += __builtin_popcount(
          _mm512_mask_cmp_ps_mask(m, load(x + i, m), _mm512_set1_ps(cutoff), _CMP_GE_OQ));
    }
    return count;
  };
  if (!by_rank) total = mass_above(-INFINITY);
  float cutoff = max;
  for (float below = 1.0f; ; below *= 2) {
    cutoff = below > 64 ? -INFINITY : max - (by_rank ? below : below * row.temperature);
    if (cutoff == -INFINITY) break;
    if (by_rank ? count_above(cutoff) >= row.top_k : mass_above(cutoff) >= row.top_p * total) break;
  }
  near.resize(n + LANES);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    const __mmask16 m = first_lanes(n - i);
    const Vec v = load(x + i, m);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(m, v, _mm512_set1_ps(cutoff), _CMP_GE_OQ);
    _mm512_storeu_ps(near.data() + count, _mm512_maskz_compress_ps(above, v));
    count += __builtin_popcount(above);
  }
  const auto begin = near.begin();
  float lowest = -INFINITY;
  if (by_rank && row.top_k <= count) {
    std::nth_element(begin, begin + row.top_k - 1, begin + count, std::greater<float>());
    lowest = near[row.top_k - 1];
    count = std::partition(begin, begin + count, [&](float v) { return v >= lowest; }) - begin;
  }
  if (row.top_p >= 1) return lowest;
  std::sort(begin, begin + count, std::greater<float>());
  auto mass = [&](int64_t i) { return exponential((near[i] - max) * inverse); };
  if (by_rank)
    for (int64_t i = 0; i < count; ++i) total += mass(i);
  double above = 0;
  for (int64_t i = 0; i < count; ++i) {
    above += mass(i);
    lowest = near[i];
    if (above >= row.top_p * total) break;
  }
  return lowest;
}

int64_t sample_row(float* x, int64_t n, const SamplingRow& row) {
  const float max = max_of(x, n);
  const int64_t greedy = index_of(x, n, max);
  if (row.temperature == 0) return greedy;
  static thread_local std::vector<float> near;
  static thread_local std::vector<double> sums;
  const bool filters = row.top_k < n || row.top_p < 1;
  const float lowest = filters ? lowest_kept(x, n, max, row, near) : -INFINITY;
  const float inverse = 1.0f / row.temperature;
  sums.clear();
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += CDF_BLOCK) {
    const int64_t end = std::min(n, begin + CDF_BLOCK);
    Vec sum = _mm512_setzero_ps();
    for (int64_t i = begin; i < end; i += LANES) {
      const __mmask16 m = first_lanes(end - i);
      const Vec v = load(x + i, m);
      Vec p = unnormalized(v, max, inverse);
      const __mmask16 kept = _mm512_mask_cmp_ps_mask(m, v, _mm512_set1_ps(lowest), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(p, _mm512_set1_ps(row.min_p), _CMP_GE_OQ);
      p = _mm512_maskz_mov_ps(kept, p);
      store(x + i, p, m);
      sum = _mm512_add_ps(sum, p);
    }
    total += _mm512_reduce_add_ps(sum);
    sums.push_back(total);
  }
  const double target = uniform(row.seed, row.position) * total;
  const int64_t block = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
  if (block == static_cast<int64_t>(sums.size())) return greedy;  // broken logits
  double below = block ? sums[block - 1] : 0;
  int64_t token = greedy;
  for (int64_t i = block * CDF_BLOCK; i < std::min(n, (block + 1) * CDF_BLOCK); ++i) {
    if (x[i] > 0) token = i;  // the last one kept, should rounding pass the end
    below += x[i];
    if (below > target) break;
  }
  return token;
}

}  // namespace

// ---- The C interface ----------------------------------------------------------------------------

#pragma GCC visibility push(default)
extern "C" {

#define STOKER_OPS(T, NAME)                                                                        \
  void stoker_pack_##NAME(const T* weight, int64_t num_in, int64_t num_out, uint32_t* packed) {    \
    pack(weight, num_in, num_out, packed);                                                         \
  }                                                                                                \
  void stoker_linear_##NAME(const T* x, int64_t x_stride, int64_t num_tokens,                      \
                            const uint32_t* packed, const T* bias, int64_t num_in,                 \
                            int64_t num_out, void* out, int32_t out_is_f32) {                      \
    if (out_is_f32)                                                                                \
      linear(x, x_stride, num_tokens, packed, bias, num_in, num_out, static_cast<float*>(out));    \
    else                                                                                           \
      linear(x, x_stride, num_tokens, packed, bias, num_in, num_out, static_cast<T*>(out));        \
  }                                                                                                \
  void stoker_gguf_linear_##NAME(const T* x, int64_t x_stride, int64_t num_tokens,                 \
                                 const gguf::Part* parts, int64_t num_parts, const T* bias,        \
                                 int64_t num_in, int64_t num_out, void* out, int32_t out_is_f32) { \
    if (out_is_f32)                                                                                \
      gguf::linear(x, x_stride, num_tokens, parts, num_parts, bias, num_in, num_out,               \
                   static_cast<float*>(out));                                                      \
    else                                                                                           \
      gguf::linear(x, x_stride, num_tokens, parts, num_parts, bias, num_in, num_out,               \
                   static_cast<T*>(out));                                                          \
  }                                                                                                \
  void stoker_gguf_rows_##NAME(const gguf::Part* part, int64_t num_in, const int64_t* rows,        \
                               int64_t num_rows, T* out) {                                         \
    gguf::read_rows(*part, num_in, rows, num_rows, out);                                           \
  }                                                                                                \
  void stoker_rms_norm_##NAME(const T* x, int64_t x_stride, float* residual, const void* weight,   \
                              int32_t weight_is_f32, int64_t num_rows, int64_t n, float eps,       \
                              T* out) {                                                            \
    rms_norm(x, x_stride, residual, {weight, weight_is_f32 != 0}, num_rows, n, eps, out);          \
  }                                                                                                \
  void stoker_silu_and_mul_##NAME(const T* x, int64_t x_stride, int64_t num_rows, int64_t n,       \
                                  T* out) {                                                        \
    gated_activation<T, Gate::SILU>(x, x_stride, num_rows, n, out);                                \
  }                                                                                                \
  void stoker_gelu_and_mul_##NAME(const T* x, int64_t x_stride, int64_t num_rows, int64_t n,       \
                                  T* out) {                                                        \
    gated_activation<T, Gate::GELU_TANH>(x, x_stride, num_rows, n, out);                           \
  }                                                                                                \
  void stoker_experts_##NAME(const T* x, int64_t x_stride, int64_t num_tokens, int64_t top_k,      \
                             const int32_t* ids, const float* weights, const Experts* of,          \
                             T* out) {                                                             \
    experts(x, x_stride, num_tokens, top_k, ids, weights, *of, out);                               \
  }                                                                                                \
  void stoker_write_qkv_##NAME(T* qkv, int64_t stride, int64_t num_tokens,                         \
                               const int64_t* positions, const int64_t* out_slots,                 \
                               int64_t page_size, const Layer* layer, T* k_cache, T* v_cache) {    \
    write_qkv(qkv, stride, num_tokens, positions, out_slots, page_size, *layer, k_cache, v_cache); \
  }                                                                                                \
  void stoker_attend_##NAME(const T* q, int64_t q_stride, const Batch* batch, const Layer* layer,  \
                            const T* k, const T* v, T* out) {                                      \
    Attention<T>(*batch, *layer, q, q_stride, k, v, out).run();                                    \
  }                                                                                                \
  void stoker_decoder_layer_##NAME(const T* x, float* residual, int64_t num_tokens,                \
                                   const DecoderLayer* layer, const Batch* batch,                  \
                                   const int64_t* positions, const int64_t* out_slots,             \
                                   T* k_cache, T* v_cache, T* out) {                               \
    decoder_layer(x, residual, num_tokens, *layer, *batch, positions, out_slots, k_cache, v_cache, \
                  out);                                                                            \
  }

STOKER_OPS(bf16, bf16)
STOKER_OPS(float, f32)

int64_t stoker_gguf_panel_bytes(gguf::Type type, int64_t num_in) {
  return gguf::panel_bytes(type, num_in);
}

void stoker_gguf_pack(const uint8_t* raw, int64_t num_in, int64_t num_out, gguf::Type type,
                      uint8_t* packed) {
  gguf::with_format(type, [&](auto format) {
    gguf::pack<decltype(format)>(raw, num_in, num_out, packed);
  });
}

void stoker_sample(float* logits, int64_t num_rows, int64_t vocab, const float* temperature,
                   const int32_t* top_k, const float* top_p, const float* min_p,
                   const int64_t* seeds, const int32_t* positions, int32_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1) if (num_rows > 1)
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = static_cast<int32_t>(sample_row(
        logits + r * vocab, vocab,
        {temperature[r], top_p[r], min_p[r], top_k[r], seeds[r], positions[r]}));
}

}  // extern "C"
#pragma GCC visibility pop
