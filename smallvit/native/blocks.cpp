// Consecutive transformer blocks on a CPU: their forward and their backward pass, each as one call. A call of another function
// merges tokens between two blocks.
//
// A block is two residual branches, and both have the same form:
//
//     out = x + keep * (middle(norm(x) W1' + b1) W2' + b2)
//
// x is a matrix with a token in each row. A weight such as W1 is stored as PyTorch stores it, (outputs, inputs), and ' means
// transposed: a linear map computes x W'. In the first branch, `middle` is attention: W1 makes the queries, keys and values. In
// the second branch, the MLP, it is an activation, or an activation of the first half of the columns times the second half (a
// gated MLP). `keep` is a factor for each image (stochastic depth); an image whose factor is 0 skips the branch. The functions
// below do the steps of a branch one after another, forward and backward. The Python code that they replace is `Block` in
// smallvit/vit.py and `attend` in smallvit/attention.py.
//
// The *inside* of a branch is what the forward pass computes before the second linear map W2 and the backward pass needs: the
// mean and deviation of each token, the queries, keys, values and attention maps, or the hidden units of an MLP.
//
// Why this is fast. (1) A few images at a time (a group) go through all branches, so that their tokens stay in the cache. (2)
// Weights are copied once a call into the order in which the matrix product reads them. (3) The steps between two matrix
// products are done in one pass. (4) If Python passes the memory from which the optimizer reads gradients, gradients are added
// there directly; otherwise it passes new memory. (5) Python passes all memory for tokens, and passes the same memory in each
// step, because the first use of each new page of memory takes time. (6) With tile registers, matrix products are faster than
// memory. The backward pass then computes the insides again instead of reading them. (7) An attention map has a row for each
// key, so that softmax works on vectors of queries. (8) The backward pass loads the numbers of the next head into the cache
// while it computes the current one.
//
// Matrices are row-major, with a stride (the number of floats from one row to the next). Letters in shapes: n tokens of an
// image, e width of one head. All widths are multiples of 16; the hidden width of an MLP is filled up with zeros.
//
// The same call with the same number of threads gives the same bits, however busy the machine is. Another number of threads
// adds the gradients of the images in another order, so their last digits differ.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <utility>
#include <vector>

#include "shared.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VL__)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif
#if HAS_BF16 && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

// ---------------------------------------------------------------------------------------------------------------- vectors

// A tile of a matrix product (see `tile`) is ROWS x VECS registers, so that it fits in the registers together with its inputs.
// A tile that is VECS vectors wide has at most ROWS rows. A narrower tile needs fewer registers for each row, so it may have up
// to MOST_ROWS rows.
enum { VECS = LANES == 16 ? 4 : 2, ROWS = 6, MOST_ROWS = LANES == 16 ? 12 : 6 };

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLE 1
#endif
#endif

// Combine all lanes of a vector with an operation such as +; the result is in every lane.
#ifdef HAS_SHUFFLE
template <int step, int... i>
static inline Vec partners(Vec v, std::integer_sequence<int, i...>) {  // lane i gets lane i + step or i - step
  return __builtin_shufflevector(v, v, (i ^ step)...);
}
template <int step = LANES / 2, class Combine>
static inline Vec combined(Vec v, Combine combine) {
  if constexpr (step == 0) return v;
  else return combined<step / 2>(combine(v, partners<step>(v, std::make_integer_sequence<int, LANES>())), combine);
}
#else
template <class Combine>
static inline Vec combined(Vec v, Combine combine) {
  for (int step = LANES / 2; step; step /= 2) {
    Vec partner = {};
    for (int i = 0; i < LANES; i++) partner[i] = v[i ^ step];
    v = combine(v, partner);
  }
  return v;
}
#endif
static inline Vec sum(Vec v) {
  return combined(v, [](Vec a, Vec b) { return a + b; });
}

static inline Vec exp_of_negative(Vec x) {  // e^x for x <= 0, relative error 2e-7; 0 below about -87.7
  Vec t = x * 1.44269504f;                  // e^x = 2^t; NaN stays NaN
  t = t < -127.f ? fill(-127.f) : t;
  Vec whole = (t + 12582912.f) - 12582912.f;  // 1.5 * 2^23: a float of this size has no digits after the point
  Vec f = t - whole;
  Vec p = 1.5352e-4f * f + 1.339887e-3f;  // 2^f on [-1/2, 1/2] as a polynomial
  p = p * f + 9.618437e-3f;
  p = p * f + 5.550332e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return p * (Vec)((__builtin_convertvector(whole, Int) + 127) << 23);  // the bits of the float 2^whole
}

static inline Vec reciprocal(Vec x) {  // 1 / x, relative error 1e-7, for x from 1 to 1e30
#if defined(__AVX512F__)
  Vec guess = (Vec)_mm512_rcp14_ps((__m512)x);
#elif defined(__AVX2__)
  Vec guess = (Vec)_mm256_rcp_ps((__m256)x);
#else
  return 1.f / x;
#endif
#if defined(__AVX2__)
  return guess * (2.f - x * guess);  // one step of Newton's method doubles the number of right digits
#endif
}

static inline void silu(Vec x, Vec& value, Vec& slope) {  // x / (1 + e^-x) and its derivative
  Vec t = exp_of_negative((Vec)((Int)x | (int)0x80000000)), s = reciprocal(1.f + t);  // e^-|x|
  s = x >= 0 ? s : t * s;
  value = x * s;
  slope = s + value * (1.f - s);
}

static inline void gelu(Vec x, Vec& value, Vec& slope) {  // x Phi(x) and its derivative
  // Phi is the distribution function of the normal distribution: the probability of a value below x
  Vec size = (Vec)((Int)x & 0x7fffffff), density = exp_of_negative(x * x * -0.5f);
  Vec t = reciprocal(0.23164190f * size + 1.f);  // Abramowitz and Stegun 7.1.26, absolute error 1e-7
  Vec tail = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t * density * 0.5f;
  Vec phi = x >= 0 ? 1.f - tail : tail;
  value = x * phi;
  slope = phi + x * density * 0.39894228f;
}

// ------------------------------------------------------------------------------------------------------- numbers of 16 bits

// With bf16, both factors of a linear map, tokens and weights, are rounded to 16 bits. Two such numbers, a *pair*, take the
// memory of one float. A product A B sums over the depth: the columns of A and the rows of B. A pair holds two neighbors along
// this axis, so the depth counted in pairs is half as large. One instruction multiplies two pairs, number by number, and adds
// both products to a float. Sums, attention and everything else stay floats.
#if HAS_BF16
static inline Vec add_product_of_pairs(Vec sum, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// The pairs (first[0], second[0]), (first[1], second[1]), and so on. One instruction rounds the 16 numbers of `first` and then
// the 16 of `second`; another one brings the two numbers of each pair together.
static inline Vec pair(Vec first, Vec second) {
  Int order;
  for (int i = 0; i < LANES; i++) order[i] = i | (LANES + i) << 16;  // number i, then number 16 + i; `order` is a constant
  return (Vec)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
static inline void store_pairs(float* p, Vec v) { *(__m256i_u*)p = (__m256i)_mm512_cvtneps_pbh((__m512)v); }
#else
static inline Vec add_product_of_pairs(Vec sum, Vec, Vec) { return sum; }
static inline Vec pair(Vec first, Vec) { return first; }
static inline void store_pairs(float*, Vec) {}
#endif

// Pairs of two neighbors in a row: (rows, columns / 2) pairs.
static void pairs_along_rows(long rows, long columns, const float* x, long stride, float* out) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < columns; j += LANES) store_pairs(out + (i * columns + j) / 2, load(x + i * stride + j));
}

// Pairs of two neighbors in a column: (rows / 2, columns) pairs. The last row of an odd number of rows is paired with zeros.
static void pairs_of_rows(long rows, long columns, const float* x, long stride, float* out) {
  for (long i = 0; i < rows; i += 2)
    for (long j = 0; j < columns; j += LANES) {
      Vec second = i + 1 < rows ? load(x + (i + 1) * stride + j) : (Vec){};
      store(out + i / 2 * columns + j, pair(load(x + i * stride + j), second));
    }
}

// --------------------------------------------------------------------------------------------------------- matrix products

enum Precision { FP32, BF16, BF16_TILES };

struct Matrix {
  const float* data;
  long stride;
};

struct Product {  // C = add + bias + A B; A is (rows, depth), B is (depth, columns)
  Matrix a, b;
  float* c;
  long c_stride;
  Matrix add = {nullptr, 0};        // a matrix as large as C, or C itself
  const float* bias = nullptr;      // one number for each column
};

// Compute one tile of C: `rows` rows, `vecs` vectors wide. Each of its vectors stays in a register while the loop goes over the
// depth and adds products to it. One step of the loop reads `vecs` vectors of B and `rows` numbers of A. If A is transposed, it
// is stored as (depth, rows).
template <int rows, int vecs, bool transposed, bool pairs>
static void tile(long depth, const Product& p) {
  Vec total[rows][vecs];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++) total[i][j] = p.bias ? load(p.bias + j * LANES) : (Vec){};
  const float *a = p.a.data, *b = p.b.data;
  const long a_stride = p.a.stride, b_stride = p.b.stride;
  for (long k = 0; k < depth; k++, b += b_stride) {
    Vec right[vecs];
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++) right[j] = load(b + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      float left = transposed ? a[k * a_stride + i] : a[i * a_stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < vecs; j++)
        total[i][j] = pairs ? add_product_of_pairs(total[i][j], fill(left), right[j]) : total[i][j] + left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++) {
      Vec value = p.add.data ? total[i][j] + load(p.add.data + i * p.add.stride + j * LANES) : total[i][j];
      store(p.c + i * p.c_stride + j * LANES, value);
    }
}

template <int rows, int vecs, bool transposed, bool pairs>
static inline void tile_of(long wanted, long depth, const Product& p) {  // the tile with `wanted` rows, at most `rows`
  if constexpr (rows > 0) {
    if (wanted == rows) tile<rows, vecs, transposed, pairs>(depth, p);
    else tile_of<rows - 1, vecs, transposed, pairs>(wanted, depth, p);
  }
}

template <int most_rows, int vecs, bool transposed, bool pairs>
static void panel(long rows, long depth, const Product& p) {  // `vecs` vectors of columns, all rows
  for (long i = 0, n; i < rows; i += n) {
    n = std::min<long>(most_rows, rows - i);
    // the last two tiles get about equally many rows: a tile with few rows is slow
    if (rows - i > most_rows && rows - i < 2 * most_rows) n = (rows - i + 1) / 2;
    Product part = p;
    part.a.data += transposed ? i : i * p.a.stride;
    part.c += i * p.c_stride;
    if (p.add.data) part.add.data += i * p.add.stride;
    tile_of<most_rows, vecs, transposed, pairs>(n, depth, part);
  }
}

static inline long panel_vecs(long columns) {  // width of the next panel in vectors: VECS, 2 or 1
  long left = columns / LANES;
  return left >= VECS ? VECS : left >= 2 ? 2 : 1;
}

#if HAS_AMX
// AMX: the processor has eight tile registers of 16 x 16 floats. Here, numbers 0 to 3 hold sums, 4 and 5 hold pairs of A, and 6
// and 7 hold pairs of B. One instruction multiplies a tile of A, 16 x 16 pairs, by a tile of B, and adds the product to a sum.
enum { TILE = 16 };
template <int tile>
static inline void load_tile(const float* p, long stride) {  // stride 0: all rows are the same
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride * 4), "i"(tile) : "memory");
}
template <int tile>
static inline void store_tile(float* p, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride * 4), "i"(tile) : "memory");
}
template <int tile>
static inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int sum, int a, int b>
static inline void add_product_of_tiles() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b)); }

static bool tiles_allowed() {  // Linux gives tile registers only to processes that ask for them
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

struct TilesInUse {  // sets the size of the tile registers of this thread for as long as this object lives
  const bool wanted;
  explicit TilesInUse(long precision) : wanted(precision == BF16_TILES) {
    alignas(64) unsigned char sizes[64] = {1};
    for (int tile = 0; tile < 8; tile++) sizes[16 + 2 * tile] = 4 * TILE, sizes[48 + tile] = TILE;  // bytes in a row, rows
    if (wanted) asm volatile("ldtilecfg %0" ::"m"(sizes));
  }
  ~TilesInUse() {
    if (wanted) asm volatile("tilerelease");
  }
};

// Load what the product is added to into a tile register: the bias, or else the matrix `add`, or else zeros. A matrix `add`
// with less than 16 rows left is not loaded, and neither is one beside a bias: `finish_sum` adds it.
template <int tile>
static inline void start_sum(long rows, const Product& p, long i, long j) {
  if (p.bias) load_tile<tile>(p.bias + j, 0);
  else if (p.add.data && i + TILE <= rows) load_tile<tile>(p.add.data + i * p.add.stride + j, p.add.stride);
  else clear_tile<tile>();
}

// Write the sum in a tile register to C at row i and column j. Rows behind the last one of C are left out. The matrix `add` is
// added here if `start_sum` has not done so.
template <int tile>
static inline void finish_sum(long rows, const Product& p, long i, long j) {
  if (i + TILE <= rows && !(p.bias && p.add.data)) return store_tile<tile>(p.c + i * p.c_stride + j, p.c_stride);
  alignas(64) float sum[TILE * TILE];
  store_tile<tile>(sum, TILE);
  for (long k = 0; k < std::min<long>(TILE, rows - i); k++) {
    Vec value = load(sum + k * TILE);
    store(p.c + (i + k) * p.c_stride + j, p.add.data ? value + load(p.add.data + (i + k) * p.add.stride + j) : value);
  }
}

// Compute up to four tiles of C, two by two: those at row i and column j, beside it if `two_columns`, and below if `two_rows`.
// Whole tiles of A are read, so the memory behind its last row must be readable up to a multiple of 16 rows. Its values there
// do not matter.
template <bool two_rows, bool two_columns>
static inline void square_of_tiles(long rows, long depth, const Product& p, long i, long j) {
  start_sum<0>(rows, p, i, j);
  if (two_columns) start_sum<1>(rows, p, i, j + TILE);
  if (two_rows) start_sum<2>(rows, p, i + TILE, j);
  if (two_rows && two_columns) start_sum<3>(rows, p, i + TILE, j + TILE);
  const float *a = p.a.data + i * p.a.stride, *b = p.b.data + j;
  for (long k = 0; k < depth; k += TILE, a += TILE, b += TILE * p.b.stride) {
    load_tile<4>(a, p.a.stride);
    load_tile<6>(b, p.b.stride);
    add_product_of_tiles<0, 4, 6>();
    if (two_columns) load_tile<7>(b + TILE, p.b.stride), add_product_of_tiles<1, 4, 7>();
    if (two_rows) load_tile<5>(a + TILE * p.a.stride, p.a.stride), add_product_of_tiles<2, 5, 6>();
    if (two_rows && two_columns) add_product_of_tiles<3, 5, 7>();
  }
  finish_sum<0>(rows, p, i, j);
  if (two_columns) finish_sum<1>(rows, p, i, j + TILE);
  if (two_rows) finish_sum<2>(rows, p, i + TILE, j);
  if (two_rows && two_columns) finish_sum<3>(rows, p, i + TILE, j + TILE);
}

static void panel_of_tiles(long rows, long columns, long depth, const Product& p) {  // one panel of C
  for (long i = 0; i < rows; i += 2 * TILE)
    for (long j = 0; j < columns; j += 2 * TILE) {
      if (i + TILE < rows && j + TILE < columns) square_of_tiles<true, true>(rows, depth, p, i, j);
      else if (i + TILE < rows) square_of_tiles<true, false>(rows, depth, p, i, j);
      else if (j + TILE < columns) square_of_tiles<false, true>(rows, depth, p, i, j);
      else square_of_tiles<false, false>(rows, depth, p, i, j);
    }
}
#else
enum { TILE = 1 };
static bool tiles_allowed() { return false; }
struct TilesInUse {
  explicit TilesInUse(long) {}
};
static void panel_of_tiles(long, long, long, const Product&) {}
#endif

// The whole product, one panel of columns after another. If B is packed, each panel of it is stored as a matrix of its own.
template <bool transposed, bool pairs>
static void multiply(long rows, long columns, long depth, const Product& p, bool packed = false, bool tiles = false) {
  for (long j = 0, vecs; j < columns; j += vecs * LANES) {
    vecs = panel_vecs(columns - j);
    Product part = p;
    part.b = packed ? Matrix{p.b.data + j * depth, vecs * LANES} : Matrix{p.b.data + j, p.b.stride};
    part.c += j;
    if (p.add.data) part.add.data += j;
    if (p.bias) part.bias += j;
    if (tiles) panel_of_tiles(rows, vecs * LANES, depth, part);
    else if (vecs == VECS) panel<ROWS, VECS, transposed, pairs>(rows, depth, part);
    else if (vecs == 2) panel<MOST_ROWS, 2, transposed, pairs>(rows, depth, part);
    else panel<MOST_ROWS, 1, transposed, pairs>(rows, depth, part);
  }
}

#ifdef HAS_SHUFFLE
// Divide the vectors a and b into blocks of `step` lanes, with the numbers 0, 1, 2, ... Exchange block 1 of a with block 0 of
// b, block 3 of a with block 2 of b, and so on. The other blocks stay where they are.
template <int step, int... i>
static inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, i...>) {
  Vec even = __builtin_shufflevector(a, b, (i & step ? LANES + i - step : i)...);
  b = __builtin_shufflevector(a, b, (i & step ? LANES + i : i + step)...);
  a = even;
}
// Transpose LANES vectors of LANES numbers: exchange blocks of 1 lane, then of 2 lanes, then of 4, up to half a vector.
template <int step>
static inline void transpose_square(Vec* row) {
  if constexpr (step < LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & step)) exchange<step>(row[i], row[i + step], std::make_integer_sequence<int, LANES>());
    transpose_square<2 * step>(row);
  }
}
#endif

// out (columns, rows) = x'. Each row of `out` is filled up with zeros to `out_stride` numbers.
static void transpose(long rows, long columns, Matrix x, float* out, long out_stride) {
#ifdef HAS_SHUFFLE
  for (long i = 0; i < out_stride; i += LANES)
    for (long j = 0; j < columns; j += LANES) {
      Vec row[LANES];
#pragma GCC unroll 16
      for (int k = 0; k < LANES; k++) row[k] = i + k < rows ? load(x.data + (i + k) * x.stride + j) : (Vec){};
      transpose_square<1>(row);
#pragma GCC unroll 16
      for (int k = 0; k < LANES; k++) store(out + (j + k) * out_stride + i, row[k]);
    }
#else
  for (long i = 0; i < out_stride; i++)
    for (long j = 0; j < columns; j++) out[j * out_stride + i] = i < rows ? x.data[i * x.stride + j] : 0.f;
#endif
}

// Copy the matrix B(k, j) = w[k * step_k + j * step_j] panel by panel, in the order in which `multiply` reads it. One of the
// steps is 1.
static void pack(const float* w, long depth, long columns, long step_k, long step_j, float* out) {
  for (long j = 0, width; j < columns; j += width) {
    width = panel_vecs(columns - j) * LANES;
    float* to = out + j * depth;
    if (step_j == 1)
      for (long k = 0; k < depth; k++) memcpy(to + k * width, w + k * step_k + j, width * sizeof(float));
    else {
      const long whole = depth / LANES * LANES;
      transpose(width, whole, {w + j * step_j, step_j}, to, width);
      for (long i = 0; i < width; i++)
        for (long k = whole; k < depth; k++) to[k * width + i] = w[k + (j + i) * step_j];
    }
  }
}

// out = add + bias + x W', for a packed W (of pairs, with bf16); `pairs` is scratch memory for x.
static void linear(long precision, long rows, long columns, long depth, Matrix x, const float* packed, float* out, long out_stride,
                   float* pairs, Matrix add = {nullptr, 0}, const float* bias = nullptr) {
  if (precision == FP32) return multiply<false, false>(rows, columns, depth, {x, {packed, 0}, out, out_stride, add, bias}, true);
  pairs_along_rows(rows, depth, x.data, x.stride, pairs);
  const bool tiles = precision == BF16_TILES && depth / 2 % TILE == 0;
  multiply<false, true>(rows, columns, depth / 2, {{pairs, depth / 2}, {packed, 0}, out, out_stride, add, bias}, true, tiles);
}

// For out = x W' + b, with the gradient `d_out` of `out`: add d_out' x to the gradient of W (outputs, inputs), and the sum of
// the rows of d_out to the gradient of b (outputs). The product d_out' x is computed for 64 rows of d_out and x at a time.
// These rows stay in the cache, and are read again for each tile of W.
static void linear_weight_gradients(long precision, long rows, long outputs, long inputs, Matrix d_out, Matrix x, float* d_weight,
                                    float* d_bias, float* pairs) {
  const long some = 64;
  if (d_bias)
    for (long i = 0; i < rows; i++)
      for (long j = 0; j < outputs; j += LANES) store(d_bias + j, load(d_bias + j) + load(d_out.data + i * d_out.stride + j));
  if (!d_weight) return;
  if (precision == BF16_TILES) {  // d_out' and x in pairs of rows, with zeros behind them up to a whole tile
    const long depth = (rows + 2 * TILE - 1) / (2 * TILE) * TILE;
    float *left = pairs, *right = left + depth * outputs, *rest = right + depth * inputs;
    pairs_of_rows(rows, outputs, d_out.data, d_out.stride, rest);
    transpose((rows + 1) / 2, outputs, {rest, outputs}, left, depth);
    pairs_of_rows(rows, inputs, x.data, x.stride, right);
    memset(right + (rows + 1) / 2 * inputs, 0, (depth - (rows + 1) / 2) * inputs * sizeof(float));
    const Product p = {{left, depth}, {right, inputs}, d_weight, inputs, {d_weight, inputs}};
    return multiply<false, true>(outputs, inputs, depth, p, false, true);
  }
  if (precision == BF16) {
    float* right = pairs + (rows + 1) / 2 * outputs;
    pairs_of_rows(rows, outputs, d_out.data, d_out.stride, pairs);
    pairs_of_rows(rows, inputs, x.data, x.stride, right);
    rows = (rows + 1) / 2, d_out = {pairs, outputs}, x = {right, inputs};
  }
  for (long i = 0, n; i < rows; i += n) {
    n = rows - i <= some * 3 / 2 ? rows - i : some;
    Product p = {{d_out.data + i * d_out.stride, d_out.stride}, {x.data + i * x.stride, x.stride}, d_weight, inputs,
                 {d_weight, inputs}};
    if (precision == BF16) multiply<true, true>(outputs, inputs, n, p);
    else multiply<true, false>(outputs, inputs, n, p);
  }
}

// ------------------------------------------------------------------------------------------------ what Python passes to us

enum Middle { ATTENTION, GELU, RELU, SWIGLU, GEGLU };
enum Weight { NORM_WEIGHT, NORM_BIAS, WEIGHT1, BIAS1, WEIGHT2, BIAS2, SCALE, WEIGHTS };

struct Branch {
  long middle;                // ATTENTION, an activation, or a gated activation
  long inner, outer;          // columns before and after `middle`; of attention: 3 * heads * e and heads * e
  long hidden;                // of an MLP; `outer` is the next multiple of 16, `inner` is `outer`, or twice that with gates
  long heads;                 // of attention
  float epsilon;              // of the LayerNorm
  const float* weight[WEIGHTS];  // BIAS1 and BIAS2 may be null; SCALE (heads) multiplies the logits of a head
  float* gradient[WEIGHTS];      // to which gradients are added; null for a weight that needs none
  const float* keep;          // (images) factor of the branch, 0 to skip it; null for 1
  const float* logit_bias;    // added to the logits: for each key one number, or `padded(tokens)` numbers, one for each query
  // How many floats lie between the numbers of two images, of two heads and of two keys in `logit_bias`. 0 means that all
  // images, or all heads, share the same numbers. `bias_key` is 1 if there is one number for each key.
  long bias_image, bias_head, bias_key;
};

struct Blocks {
  long images, tokens, width, branches;
  long group;                 // images that go through all branches together
  long threads;               // each thread computes some of the groups
  long precision;             // of the products of linear maps: FP32, BF16, or BF16_TILES if the processor has tile registers
  long again;                 // whether the backward pass computes the insides of branches again, instead of keeping them
  Branch* branch;
};

static inline bool gated(const Branch& b) { return b.middle == SWIGLU || b.middle == GEGLU; }
static inline long padded(long n) { return (n + LANES - 1) / LANES * LANES; }
static inline long groups_of(const Blocks& s) { return (s.images + s.group - 1) / s.group; }
static inline long rows_of(const Blocks& s) { return s.group * s.tokens; }
// Rows whose distance is a multiple of 4 kB compete for the same places of the cache. So 16 unused floats follow each row.
static inline long stride_of(long columns) { return columns + 16; }

struct Memory {  // hands out pieces of a block of memory; with no block, it only counts
  float* start;
  long used = 0;
  float* take(long floats) {
    float* piece = start ? start + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return piece;
  }
};

struct Inside {  // the inside of one branch (see the top of this file), for one group of images
  float *inner, *outer, *statistics, *maps;
  Inside(const Blocks& s, const Branch& b, bool with_maps, Memory& memory) {
    const long rows = rows_of(s);
    const bool attention = b.middle == ATTENTION;
    inner = memory.take(rows * stride_of(b.inner));
    outer = attention ? memory.take(rows * b.outer) : nullptr;  // the backward pass computes that of an activation again
    statistics = memory.take(rows * 2);
    maps = attention && with_maps ? memory.take(s.group * b.heads * s.tokens * padded(s.tokens)) : nullptr;
  }
};

struct Scratch {  // of one thread
  float *normed, *outer, *d_inner, *d_outer, *d_branch, *transposed, *map, *d_map, *pairs;
  long* image;  // the images of the group that do not skip the branch
  Scratch(const Blocks& s, Memory& memory) {
    const long rows = rows_of(s), map_size = s.tokens * padded(s.tokens);
    long most_inner = 0, most_outer = 0, head = 0;
    for (long i = 0; i < s.branches; i++) {
      const Branch& b = s.branch[i];
      most_inner = std::max(most_inner, b.inner), most_outer = std::max(most_outer, b.outer);
      if (b.middle == ATTENTION) head = std::max(head, b.outer / b.heads);
    }
    normed = memory.take(rows * s.width);
    outer = memory.take(rows * stride_of(most_outer));
    d_inner = memory.take(rows * stride_of(most_inner));
    d_outer = memory.take(rows * stride_of(most_outer));
    d_branch = memory.take(rows * s.width);
    transposed = memory.take(head * padded(s.tokens));
    map = memory.take(map_size);
    d_map = memory.take(map_size);
    const long widest = most_inner + std::max(s.width, most_outer);
    pairs = memory.take(s.precision ? std::max((2 * rows + 4 * TILE) * widest, s.width * widest / 2) : 0);
    image = (long*)memory.take(2 * s.group);
  }
};

struct Packed {  // weights of one branch in the order in which `linear` reads them
  float *first, *second;  // W1 and W2, in the order of the forward pass or of the backward pass, whichever this call is
  float* again;           // W1 in the order of the forward pass, for a backward pass that computes the inside again
  Packed(const Blocks& s, const Branch& b, Memory& memory) {
    first = memory.take(s.width * b.inner);
    second = memory.take(s.width * b.outer);
    again = memory.take(s.again ? s.width * b.inner : 0);
  }
};

static void pack_weight(bool half, bool backward, const float* w, long outputs, long inputs, float* scratch, float* out) {
  if (half && backward) pairs_of_rows(outputs, inputs, w, inputs, scratch), pack(scratch, outputs / 2, inputs, inputs, 1, out);
  else if (half) pairs_along_rows(outputs, inputs, w, inputs, scratch), pack(scratch, inputs / 2, outputs, 1, inputs / 2, out);
  else if (backward) pack(w, outputs, inputs, inputs, 1, out);  // the gradient of x is d_out W
  else pack(w, inputs, outputs, 1, inputs, out);                // out is x W'
}

// ------------------------------------------------------------------------------------------------------------ the LayerNorm

static void normalize(long width, const float* x, const float* statistics, const float* weight, const float* bias, float* out) {
  for (long j = 0; j < width; j += LANES)
    store(out + j, (load(x + j) - statistics[0]) * statistics[1] * load(weight + j) + load(bias + j));
}

static void mean_and_inverse_deviation(long width, const float* x, float epsilon, float* statistics) {
  Vec total = {}, squares = {};
  for (long j = 0; j < width; j += LANES) total += load(x + j);
  const Vec mean = sum(total) / (float)width;
  for (long j = 0; j < width; j += LANES) {
    Vec d = load(x + j) - mean;
    squares += d * d;
  }
  statistics[0] = mean[0];
  statistics[1] = 1.f / std::sqrt(sum(squares)[0] / width + epsilon);
}

// Add the gradient of x to `d_x`. It is (g - mean(g) - h mean(g h)) / deviation, with h = (x - mean) / deviation and
// g = d_out * weight.
static void normalize_backward(long width, const float* x, const float* statistics, const float* weight, const float* d_out,
                               float* d_x, float* d_weight, float* d_bias) {
  Vec total = {}, with_h = {};
  for (long j = 0; j < width; j += LANES) {
    Vec h = (load(x + j) - statistics[0]) * statistics[1], g = load(d_out + j);
    if (d_weight) store(d_weight + j, load(d_weight + j) + g * h);
    if (d_bias) store(d_bias + j, load(d_bias + j) + g);
    g *= load(weight + j);
    total += g;
    with_h += g * h;
  }
  const Vec mean = sum(total) / (float)width, mean_with_h = sum(with_h) / (float)width;
  for (long j = 0; j < width; j += LANES) {
    Vec h = (load(x + j) - statistics[0]) * statistics[1], g = load(d_out + j) * load(weight + j);
    store(d_x + j, load(d_x + j) + statistics[1] * (g - mean - h * mean_with_h));
  }
}

// -------------------------------------------------------------------------------- attention, for one image and one head each

struct Head {  // where one head of one image finds its numbers; `inner` holds queries, keys and values side by side
  long tokens, e, columns;  // `columns` is tokens, padded to whole vectors
  Matrix q, k, v;
  const float* bias;
  long bias_key;
  float scale;
};

static Head head_of(const Blocks& s, const Branch& b, const float* inner, long image, long row, long head) {
  const long e = b.outer / b.heads, stride = stride_of(b.inner);
  const float* q = inner + row * stride + head * e;
  return {s.tokens, e, padded(s.tokens), {q, stride}, {q + b.outer, stride}, {q + 2 * b.outer, stride},
          b.logit_bias + image * b.bias_image + head * b.bias_head, b.bias_key, b.weight[SCALE][head]};
}

// Load numbers into the cache before they are needed. When numbers are read in the order of memory, the processor does this by
// itself. But the numbers of a head lie far apart in memory, so the processor would wait for each row of them. These functions
// are always inlined: some compilers remove calls of a function that only loads into the cache.
#define INLINED __attribute__((always_inline)) static inline
INLINED void prefetch(const float* p, long floats) {
  for (long i = 0; i < floats; i += 16) __builtin_prefetch(p + i, 0, 2);  // for reading, into the second-level cache
}

// Load the queries, keys and values of another head. They lie `distance` floats behind those of `h`.
INLINED void prefetch_head(const Head& h, long distance) {
  for (const Matrix& x : {h.q, h.k, h.v})
    for (long i = 0; i < h.tokens; i++) prefetch(x.data + i * x.stride + distance, h.e);
}

// Compute the attention map softmax(scale q k' + bias), (n, columns). It is stored transposed: a row for each key, and a column
// for each query. A vector then holds LANES queries for one key, and the sum of a softmax goes over rows, not over the lanes of
// a vector. There are no padded keys. Queries are padded to whole vectors; the columns of padded queries are computed and not
// used.
static void attention_map(const Head& h, float* transposed, float* map) {
  const long columns = h.columns, end = h.tokens * columns;
  transpose(h.tokens, h.e, h.q, transposed, columns);
  multiply<false, false>(h.tokens, columns, h.e, {h.k, {transposed, columns}, map, columns});
  for (long j = 0; j < columns; j += LANES) {
    Vec top = fill(-INFINITY), total = {};
    const float* bias = h.bias;
    for (long at = j; at < end; at += columns, bias += h.bias_key) {
      Vec logit = load(map + at) * h.scale + (h.bias_key == 1 ? fill(*bias) : load(bias + j));
      top = larger(top, logit);
      store(map + at, logit);
    }
    for (long at = j; at < end; at += columns) {
      Vec weight = exp_of_negative(load(map + at) - top);
      total += weight;
      store(map + at, weight);
    }
    const Vec inverse = 1.f / total;
    for (long at = j; at < end; at += columns) store(map + at, load(map + at) * inverse);
  }
}

// From the gradient of the output of a head (n, e): those of its queries, keys and values. The logits are scale q k' + bias.
static void attention_backward(const Head& h, const float* map, Matrix d_out, Scratch& t, float* d_q, float* d_k, float* d_v,
                               float* d_scale) {
  const long n = h.tokens, columns = h.columns, stride = h.q.stride, end = n * columns;
  float* const d_map = t.d_map;
  multiply<false, false>(n, h.e, n, {{map, columns}, d_out, d_v, stride});
  transpose(n, h.e, d_out, t.transposed, columns);
  multiply<false, false>(n, columns, h.e, {h.v, {t.transposed, columns}, d_map, columns});
  const float factor = d_scale ? 1.f : h.scale;
  for (long j = 0; j < columns; j += LANES) {  // the gradient of the logits, by the derivative of softmax
    Vec mean = {};
    for (long at = j; at < end; at += columns) mean += load(map + at) * load(d_map + at);
    for (long at = j; at < end; at += columns) store(d_map + at, load(map + at) * (load(d_map + at) - mean) * factor);
  }
  multiply<true, false>(n, h.e, n, {{d_map, columns}, h.k, d_q, stride});
  multiply<false, false>(n, h.e, n, {{d_map, columns}, h.q, d_k, stride});
  if (!d_scale) return;
  Vec total = {};  // d_q and d_k still lack the scale; the gradient of the scale is the sum of q * d_q
  for (long i = 0; i < n; i++)
    for (long j = 0; j < h.e; j += LANES) {
      total += load(h.q.data + i * stride + j) * load(d_q + i * stride + j);
      store(d_q + i * stride + j, load(d_q + i * stride + j) * h.scale);
      store(d_k + i * stride + j, load(d_k + i * stride + j) * h.scale);
    }
  *d_scale += sum(total)[0];
}

// ------------------------------------------------------------------------------------------- one branch, for a group of images

// Write to `t.image` which images of the group that begins with `first` do not skip the branch, and return how many.
static long images_to_compute(const Blocks& s, const Branch& b, long first, Scratch& t) {
  long count = 0;
  for (long i = 0; i < std::min(s.group, s.images - first); i++)
    if (!b.keep || b.keep[first + i] != 0.f) t.image[count++] = i;
  return count;
}

// The activation `out` (rows, outer) of `inner`. If `d_out`, its gradient, is not null, that of `inner` is written to
// `d_inner`. Without gates, `d_out` and `d_inner` may be the same memory.
static void activation(const Branch& b, long rows, const float* inner, float* out, const float* d_out, float* d_inner) {
  const long stride = stride_of(b.inner), out_stride = stride_of(b.outer);
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < b.outer; j += LANES) {
      const long from = i * stride + j, to = i * out_stride + j;
      Vec x = load(inner + from), value, slope;
      if (b.middle == RELU) value = x < 0 ? (Vec){} : x, slope = x > 0 ? fill(1.f) : (Vec){};
      else if (b.middle == SWIGLU) silu(x, value, slope);
      else gelu(x, value, slope);
      if (gated(b)) {
        const Vec factor = load(inner + from + b.outer);
        store(out + to, value * factor);
        if (!d_out) continue;
        store(d_inner + from, load(d_out + to) * slope * factor);
        store(d_inner + from + b.outer, load(d_out + to) * value);
      } else {
        store(out + to, value);
        if (d_out) store(d_inner + from, load(d_out + to) * slope);
      }
    }
}

static void normalize_images(const Blocks& s, const Branch& b, long count, const float* x, const Inside& in, Scratch& t) {
  for (long i = 0; i < count; i++)
    for (long j = 0; j < s.tokens; j++) {
      const long at = i * s.tokens + j;
      const float* row = x + (t.image[i] * s.tokens + j) * s.width;
      normalize(s.width, row, in.statistics + at * 2, b.weight[NORM_WEIGHT], b.weight[NORM_BIAS], t.normed + at * s.width);
    }
}

// Everything before the second linear map, except an activation; leaves the normalized tokens in `t.normed`.
static void first_half(const Blocks& s, const Branch& b, const float* weight, long first, long count, const float* x,
                       const Inside& in, Scratch& t) {
  const long n = s.tokens, width = s.width, inner = stride_of(b.inner);
  for (long i = 0; i < count; i++)
    for (long j = 0; j < n; j++)
      mean_and_inverse_deviation(width, x + (t.image[i] * n + j) * width, b.epsilon, in.statistics + (i * n + j) * 2);
  normalize_images(s, b, count, x, in, t);
  linear(s.precision, count * n, b.inner, width, {t.normed, width}, weight, in.inner, inner, t.pairs, {nullptr, 0},
         b.weight[BIAS1]);
  if (b.middle != ATTENTION) return;
  for (long i = 0; i < count; i++)
    for (long h = 0; h < b.heads; h++) {
      Head head = head_of(s, b, in.inner, first + t.image[i], i * n, h);
      float* map = in.maps ? in.maps + (i * b.heads + h) * n * head.columns : t.map;
      attention_map(head, t.transposed, map);
      multiply<true, false>(n, head.e, n, {{map, head.columns}, head.v, in.outer + i * n * b.outer + h * head.e, b.outer});
    }
}

// The mean over heads of the keys of an attention that no image skips, by which blocks merge similar tokens: (rows, e).
static void mean_keys(const Branch& b, long rows, const float* inner, float* keys) {
  const long e = b.outer / b.heads, stride = stride_of(b.inner);
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < e; j += LANES) {
      Vec total = {};
      for (long h = 0; h < b.heads; h++) total += load(inner + i * stride + b.outer + h * e + j);
      store(keys + i * e + j, total / (float)b.heads);
    }
}

// out = x + keep * branch(x) for the group of images that begins with `first`. `x` and `out` may be the same memory. `keys` is
// null, or gets the keys of the group.
static void forward(const Blocks& s, const Branch& b, const Packed& w, long first, const float* x, float* out, float* keys,
                    const Inside& in, Scratch& t) {
  const long n = s.tokens, width = s.width;
  const long count = images_to_compute(s, b, first, t), rows = count * n, all = std::min(s.group, s.images - first) * n;
  first_half(s, b, w.first, first, count, x, in, t);
  if (keys) mean_keys(b, rows, in.inner, keys);
  Matrix outer = {in.outer, b.outer};
  if (b.middle != ATTENTION) {
    outer = {t.outer, stride_of(b.outer)};
    activation(b, rows, in.inner, t.outer, nullptr, nullptr);
  }
  if (!b.keep) return linear(s.precision, rows, width, b.outer, outer, w.second, out, width, t.pairs, {x, width}, b.weight[BIAS2]);
  linear(s.precision, rows, width, b.outer, outer, w.second, t.normed, width, t.pairs, {nullptr, 0}, b.weight[BIAS2]);
  if (out != x) memcpy(out, x, all * width * sizeof(float));
  for (long i = 0; i < count; i++) {
    const float factor = b.keep[first + t.image[i]];
    float* to = out + t.image[i] * n * width;
    const float* from = t.normed + i * n * width;
    for (long j = 0; j < n * width; j += LANES) store(to + j, load(to + j) + factor * load(from + j));
  }
}

// `d` is the gradient of the output of the branch, and becomes that of its input `x`. Gradients of weights are added to
// `gradient`.
static void backward(const Blocks& s, const Branch& b, const Packed& w, float* const* gradient, long first, const float* x,
                     float* d, const Inside& in, Scratch& t) {
  const long n = s.tokens, width = s.width, inner = stride_of(b.inner);
  const long count = images_to_compute(s, b, first, t), rows = count * n;
  if (s.again) first_half(s, b, w.again, first, count, x, in, t);
  const float* d_branch = d;
  if (b.keep) {
    for (long i = 0; i < count; i++) {
      const float factor = b.keep[first + t.image[i]];
      const float* from = d + t.image[i] * n * width;
      for (long j = 0; j < n * width; j += LANES) store(t.d_branch + i * n * width + j, load(from + j) * factor);
    }
    d_branch = t.d_branch;
  }
  const bool attention = b.middle == ATTENTION;
  const long d_outer = attention ? b.outer : stride_of(b.outer);
  float* d_inner = attention || gated(b) ? t.d_inner : t.d_outer;
  linear(s.precision, rows, b.outer, width, {d_branch, width}, w.second, t.d_outer, d_outer, t.pairs);
  Matrix outer = {in.outer, b.outer};
  if (attention) {
    for (long i = 0; i < count; i++)
      for (long h = 0; h < b.heads; h++) {
        Head head = head_of(s, b, in.inner, first + t.image[i], i * n, h);
        const float* map = in.maps + (i * b.heads + h) * n * head.columns;
        float* d_q = d_inner + i * n * inner + h * head.e;
        prefetch(map + n * head.columns, n * head.columns);  // what the next head needs, perhaps of the next image
        prefetch_head(head, h + 1 < b.heads ? head.e : n * inner - h * head.e);
        attention_backward(head, map, {t.d_outer + i * n * b.outer + h * head.e, b.outer}, t, d_q, d_q + b.outer,
                           d_q + 2 * b.outer, gradient[SCALE] ? gradient[SCALE] + h : nullptr);
      }
  } else {
    activation(b, rows, in.inner, t.outer, t.d_outer, d_inner);
    outer = {t.outer, stride_of(b.outer)};
  }
  linear_weight_gradients(s.precision, rows, width, b.outer, {d_branch, width}, outer, gradient[WEIGHT2], gradient[BIAS2], t.pairs);
  if (!s.again) normalize_images(s, b, count, x, in, t);
  linear_weight_gradients(s.precision, rows, b.inner, width, {d_inner, inner}, {t.normed, width}, gradient[WEIGHT1],
                          gradient[BIAS1], t.pairs);
  linear(s.precision, rows, width, b.inner, {d_inner, inner}, w.first, t.normed, width, t.pairs);
  const float *statistics = in.statistics, *d_normed = t.normed;
  for (long i = 0; i < count; i++)
    for (long j = 0; j < n; j++, statistics += 2, d_normed += width) {
      const long at = (t.image[i] * n + j) * width;
      normalize_backward(width, x + at, statistics, b.weight[NORM_WEIGHT], d_normed, d + at, gradient[NORM_WEIGHT],
                         gradient[NORM_BIAS]);
    }
}

// ----------------------------------------------------------------------------------------------- all branches, for all groups

// Copy a matrix (rows, columns) into a larger one, with zeros at the end of each row.
static void widen(long rows, long columns, const float* x, long new_columns, float* out) {
  for (long i = 0; i < rows; i++, x += columns, out += new_columns) {
    memcpy(out, x, columns * sizeof(float));
    memset(out + columns, 0, (new_columns - columns) * sizeof(float));
  }
}

struct Plan {  // where everything lies in the memory of the caller
  struct Part {
    float *to, *from;
    long floats;
  };
  std::vector<Branch> branch;   // those of the caller, with copies of weights that are filled up with zeros
  std::vector<Packed> packed;
  // The tokens that enter branch i for group g are at [g * branches + i]. It is null for the first branch, which reads those of
  // the caller.
  std::vector<float*> inputs;
  // The insides of branch i. If they are kept for a backward pass, those of group g are at [g * branches + i]. If not, each
  // thread has memory for one group, and those of thread t are at [t * branches + i].
  std::vector<Inside> insides;
  std::vector<Scratch> scratch;
  std::vector<std::vector<float*>> gradients;  // those of thread t and branch i begin at [t][i * WEIGHTS]
  // Each thread adds gradients in memory of its own; the first one in that of the caller. Of each other thread: the beginning
  // of this memory and its size in floats. It is set to zero before the backward pass.
  std::vector<std::pair<float*, long>> sums;
  std::vector<Part> parts;  // what is added at the end, in this order
  bool keeps;               // whether insides are kept for a backward pass
  long kept_floats, scratch_floats;

  // `s` then refers to the branches of this plan.
  Plan(Blocks& s, bool trains, bool backward, float* kept_memory, float* scratch_memory) : keeps(trains && !s.again) {
    Memory keep{kept_memory}, work{scratch_memory};
    std::vector<Part> of_copies;
    for (long i = 0; i < s.branches; i++) branch.push_back(widened(s.branch[i], s.width, backward, work, of_copies));
    s.branch = branch.data();
    for (long i = 0; i < s.branches; i++) packed.emplace_back(s, s.branch[i], work);
    for (long g = 0; trains && g < groups_of(s); g++)
      for (long i = 0; i < s.branches; i++) {
        inputs.push_back(i ? keep.take(rows_of(s) * s.width) : nullptr);
        if (keeps) insides.emplace_back(s, s.branch[i], true, keep);
      }
    for (long t = 0; t < s.threads; t++) {
      scratch.emplace_back(s, work);
      if (backward) plan_gradients(s, t, work);
      if (!keeps) plan_insides(s, trains, work);
    }
    parts.insert(parts.end(), of_copies.begin(), of_copies.end());
    kept_floats = keep.used;
    scratch_floats = work.used;
  }

  // An MLP whose weights are copies with zeros up to the hidden width `outer`. The gradients of these copies are added to those
  // of the caller at the end: this is appended to `at_end`.
  static Branch widened(Branch b, long width, bool backward, Memory& work, std::vector<Part>& at_end) {
    if (b.middle == ATTENTION || b.hidden == b.outer) return b;
    const long maps = b.inner / b.outer;  // 2 with gates
    const struct {
      Weight name;
      long rows, columns, new_columns;
    } shapes[] = {{WEIGHT1, maps, b.hidden * width, b.outer * width},
                  {BIAS1, maps, b.hidden, b.outer},
                  {WEIGHT2, width, b.hidden, b.outer}};
    for (auto& [name, rows, columns, new_columns] : shapes) {
      if (!b.weight[name]) continue;
      float* copy = work.take(rows * new_columns);
      if (copy) widen(rows, columns, b.weight[name], new_columns, copy);
      b.weight[name] = copy;
      if (!backward || !b.gradient[name]) continue;
      float* gradient = work.take(rows * new_columns);
      if (!gradient) continue;  // the memory is only counted
      memset(gradient, 0, rows * new_columns * sizeof(float));
      for (long i = 0; i < rows; i++) at_end.push_back({b.gradient[name] + i * columns, gradient + i * new_columns, columns});
      b.gradient[name] = gradient;
    }
    return b;
  }

  // Memory for the insides of one thread. They are not kept, so all branches use the same memory, one after another.
  void plan_insides(const Blocks& s, bool with_maps, Memory& work) {
    const long start = work.used;
    long end = start;
    for (long i = 0; i < s.branches; i++) {
      work.used = start;
      insides.emplace_back(s, s.branch[i], with_maps, work);
      end = std::max(end, work.used);
    }
    work.used = end;
  }

  const Inside& inside(const Blocks& s, long group, long thread, long branch) const {
    return insides[(keeps ? group : thread) * s.branches + branch];
  }

  void plan_gradients(const Blocks& s, long thread, Memory& work) {
    std::vector<float*> own;
    const long start = work.used;
    for (long i = 0; i < s.branches; i++) {
      const Branch& b = s.branch[i];
      const long sizes[WEIGHTS] = {s.width, s.width, b.inner * s.width, b.inner, s.width * b.outer, s.width, b.heads};
      for (long j = 0; j < WEIGHTS; j++) {
        const bool first = thread == 0 || !b.gradient[j];
        own.push_back(first ? b.gradient[j] : work.take(sizes[j]));
        if (!first) parts.push_back({b.gradient[j], own.back(), sizes[j]});
      }
    }
    gradients.push_back(own);
    if (thread) sums.push_back({work.start ? work.start + start : nullptr, work.used - start});
  }
};

// Call `work(item, thread)` for the items 0, 1, ..., items - 1, in several threads.
template <class Work>
static void in_threads(long items, long most_threads, long precision, Work work) {
  share_in_threads(items, most_threads, [&](long first, long end, long thread) {
    const TilesInUse tiles(precision);
    for (long i = first; i < end; i++) work(i, thread);
  });
}

static void pack_all(const Blocks& s, const Plan& plan, bool backward) {
  float* scratch = plan.scratch[0].pairs;
  for (long i = 0; i < s.branches; i++) {
    const Branch& b = s.branch[i];
    pack_weight(s.precision != FP32, backward, b.weight[WEIGHT1], b.inner, s.width, scratch, plan.packed[i].first);
    pack_weight(s.precision != FP32, backward, b.weight[WEIGHT2], s.width, b.outer, scratch, plan.packed[i].second);
    if (backward && s.again)
      pack_weight(s.precision != FP32, false, b.weight[WEIGHT1], b.inner, s.width, scratch, plan.packed[i].again);
  }
}

// ------------------------------------------------------------------------------------------------- merging between two blocks

// The Python code that this replaces is `Merge` in smallvit/reduction/merge.py. Behind the prefix tokens, those at even places
// are sources, and those at odd places are targets. The `pairs` sources that are most similar to a target become part of it.
// The new sequence is: prefix, the other sources, targets.
struct Merging {
  long images, tokens, width, key_width, prefix, pairs, threads;
  const float *x, *keys, *size;  // (images, tokens, width), (images, tokens, key_width), (images, tokens); size may be null for 1
  float *out, *new_size;         // (images, tokens - pairs, width), (images, tokens - pairs)
  int64_t* place;                // (images, tokens): where a token is in the new sequence, alone or as a part of another one
  float* share;                  // (images, tokens): its share in the token there, 1 if it is alone
};

struct MergingScratch {  // of one thread
  float *sources, *targets, *transposed, *scores, *best;
  long *match, *order;
  MergingScratch(const Merging& m, Memory& memory) {
    const long most = m.tokens / 2 + 1;  // sources, or targets
    sources = memory.take(most * m.key_width);
    targets = memory.take(most * m.key_width);
    transposed = memory.take(padded(most) * m.key_width);
    scores = memory.take(most * padded(most));
    best = memory.take(most);
    match = (long*)memory.take(2 * most);
    order = (long*)memory.take(2 * most);
  }
};

// Write the keys of the tokens first, first + 2, first + 4, ... to `out`, each divided by its length. Return their number.
static long unit_keys(const Merging& m, const float* keys, long first, float* out) {
  long count = 0;
  for (long i = first; i < m.tokens; i += 2, count++) {
    const float* key = keys + i * m.key_width;
    Vec squares = {};
    for (long j = 0; j < m.key_width; j += LANES) squares += load(key + j) * load(key + j);
    const float length = std::max(std::sqrt(sum(squares)[0]), 1e-12f);
    for (long j = 0; j < m.key_width; j += LANES) store(out + count * m.key_width + j, load(key + j) / length);
  }
  return count;
}

// Merge the tokens of one image: find the pairs, then the place of each token in the new sequence, then the new tokens.
static void merge_image(const Merging& m, long image, const MergingScratch& t) {
  const long n = m.tokens, d = m.width, left = n - m.pairs;
  const long first_source = m.prefix + m.prefix % 2, first_target = m.prefix + 1 - m.prefix % 2;
  const float *x = m.x + image * n * d, *keys = m.keys + image * n * m.key_width, *size = m.size ? m.size + image * n : nullptr;
  float *out = m.out + image * left * d, *new_size = m.new_size + image * left, *share = m.share + image * n;
  int64_t* place = m.place + image * n;
  auto size_of = [&](long token) { return size ? size[token] : 1.f; };

  // `match`: the number of the target that is most similar to each source; `best`: how similar. A similarity of NaN counts as
  // the largest one. `order`: first the `pairs` sources that merge, the most similar one first, then the others in their old
  // order.
  const long sources = unit_keys(m, keys, first_source, t.sources), targets = unit_keys(m, keys, first_target, t.targets);
  const long columns = padded(targets), others = sources - m.pairs;
  transpose(targets, m.key_width, {t.targets, m.key_width}, t.transposed, columns);
  multiply<false, false>(sources, columns, m.key_width, {{t.sources, m.key_width}, {t.transposed, columns}, t.scores, columns});
  for (long i = 0; i < sources; i++) {
    float most = -INFINITY;
    t.match[i] = 0, t.order[i] = i;
    for (long j = 0; j < targets && !std::isnan(most); j++)
      if (!(t.scores[i * columns + j] <= most)) most = t.scores[i * columns + j], t.match[i] = j;
    t.best[i] = std::isnan(most) ? INFINITY : most;
  }
  std::stable_sort(t.order, t.order + sources, [&](long a, long b) { return t.best[a] > t.best[b]; });
  std::sort(t.order + m.pairs, t.order + sources);

  // copy all tokens that stay to their places, and add the sizes of the sources that merge to those of their targets
  auto copy = [&](long from, long to) {
    place[from] = to, share[from] = 1.f, new_size[to] = size_of(from);
    memcpy(out + to * d, x + from * d, d * sizeof(float));
  };
  for (long i = 0; i < m.prefix; i++) copy(i, i);
  for (long i = 0; i < others; i++) copy(first_source + 2 * t.order[m.pairs + i], m.prefix + i);
  for (long i = 0; i < targets; i++) copy(first_target + 2 * i, m.prefix + others + i);
  for (long i = 0; i < m.pairs; i++) {
    const long from = first_source + 2 * t.order[i];
    place[from] = m.prefix + others + t.match[t.order[i]];
    new_size[place[from]] += size_of(from);
  }
  // The new token is the mean of the target and its sources, weighted by size. It is computed from the old target: for each
  // source that merges, add (source - target) * share, where the share is the size of the source divided by that of the new
  // token.
  for (long i = 0; i < m.pairs; i++) {
    const long from = first_source + 2 * t.order[i], target = first_target + 2 * t.match[t.order[i]];
    const float total = new_size[place[from]];  // 0 if both tokens were removed before: then the target stays as it is
    share[from] = total > 0 ? size_of(from) / total : 0.f;
    share[target] = total > 0 ? size_of(target) / total : 1.f;
    const float *source = x + from * d, *start = x + target * d, part = share[from];
    float* to = out + place[from] * d;
    for (long j = 0; j < d; j += LANES) store(to + j, load(to + j) + (load(source + j) - load(start + j)) * part);
  }
}

extern "C" {

long blocks_merge_floats(const Merging* m) {  // scratch memory of one thread
  Memory counted{nullptr};
  const MergingScratch scratch(*m, counted);
  return counted.used;
}

void blocks_merge(const Merging* merging, float* scratch) {
  const Merging& m = *merging;
  const long floats = blocks_merge_floats(merging);
  in_threads(m.images, m.threads, FP32, [&](long image, long thread) {
    Memory own{scratch + thread * floats};
    merge_image(m, image, MergingScratch(m, own));
  });
}

long blocks_lanes() { return LANES; }
long blocks_has_bf16() { return HAS_BF16; }
long blocks_has_tiles() { return tiles_allowed(); }
long blocks_kept_floats(const Blocks* blocks) {
  Blocks s = *blocks;
  return Plan(s, true, false, nullptr, nullptr).kept_floats;
}
long blocks_scratch_floats(const Blocks* blocks, int trains, int backward) {
  Blocks s = *blocks;
  return Plan(s, trains, backward, nullptr, nullptr).scratch_floats;
}

// x and out are (images, tokens, width). If `keys` is not null, the last branch is an attention, and the mean over heads of its
// keys is written there, (images, tokens, e). What a backward pass needs is written to `kept`. It is null if no backward pass
// follows, or if it needs nothing.
void blocks_forward(const Blocks* blocks, const float* x, float* out, float* keys, float* kept, float* scratch) {
  Blocks s = *blocks;
  Plan plan(s, kept, false, kept, scratch);
  pack_all(s, plan, false);
  const long step = rows_of(s) * s.width, last = s.branches - 1;
  const long key_step = rows_of(s) * (s.branch[last].outer / s.branch[last].heads);
  in_threads(groups_of(s), s.threads, s.precision, [&](long group, long thread) {
    const float* in = x + group * step;
    for (long i = 0; i < s.branches; i++) {
      float* to = i < last && kept ? plan.inputs[group * s.branches + i + 1] : out + group * step;
      float* to_keys = keys && i == last ? keys + group * key_step : nullptr;
      forward(s, s.branch[i], plan.packed[i], group * s.group, in, to, to_keys, plan.inside(s, group, thread, i),
              plan.scratch[thread]);
      in = to;
    }
  });
}

// At first, `d` is the gradient of `out`; it becomes the gradient of `x`. `kept` is what the forward pass has written there.
void blocks_backward(const Blocks* blocks, const float* x, float* d, float* kept, float* scratch) {
  Blocks s = *blocks;
  Plan plan(s, true, true, kept, scratch);
  pack_all(s, plan, true);
  for (auto& [memory, floats] : plan.sums) memset(memory, 0, floats * sizeof(float));
  const long step = rows_of(s) * s.width;
  in_threads(groups_of(s), s.threads, s.precision, [&](long group, long thread) {
    for (long i = s.branches - 1; i >= 0; i--) {
      const float* in = i ? plan.inputs[group * s.branches + i] : x + group * step;
      backward(s, s.branch[i], plan.packed[i], &plan.gradients[thread][i * WEIGHTS], group * s.group, in, d + group * step,
               plan.inside(s, group, thread, i), plan.scratch[thread]);
    }
  });
  for (const Plan::Part& part : plan.parts)
    for (long j = 0; j < part.floats; j++) part.to[j] += part.from[j];
}
}
