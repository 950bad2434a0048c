// Making views of images on a CPU: sampling crops bilinearly, changing colors, and blurring.
//
// The Python code that this replaces is `PYTORCH` in smallvit/augment/kernels.py; `Kernels` there says what each function
// computes. Images are float32, (images, channels, height, width), without gaps. Each function divides its images among
// threads. A pixel is computed in the same way by each of them, so the number of threads does not change the result.
//
// Why this is fast. (1) An image is copied once so that four channels of a pixel lie side by side, and all its crops read this
// copy: one load gets a whole pixel. The copy has a black margin, so no pixel needs a test. (2) A pixel goes through all steps
// of a change of colors at once. (3) Blurring adds only the pixels that have a weight.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "shared.h"

static inline Vec load_first(const float* from, long count) {  // at most `count` numbers; the others are 0
  if (count >= LANES) return load(from);
  Vec v = {};
  for (long i = 0; i < count; i++) v[i] = from[i];
  return v;
}

static inline void store_first(float* to, Vec v, long count) {
  if (count >= LANES) return store(to, v);
  for (long i = 0; i < count; i++) to[i] = v[i];
}

// --------------------------------------------------------------------------------------------------------------- sampling

const int MARGIN = 2;  // black pixels around the copy of an image: points outside read them without a test

// Crop number v * images + i is the v-th one of image i, sampled at the points (x, y) of the grid, in coordinates from -1 to 1.
// Points outside the image are black, or with `edge` as the nearest pixel of the image.
struct Sampling {
  long images, channels, height, width, crops, area, edge, threads;  // area: the pixels of a crop
  const float *pixels, *grid;                                        // (images, channels, height, width), (2, crops, area)
  float* out;                                                        // (crops, channels, area)
};

// A pixel of the copy is a float, or four channels of an image side by side. `get` reads it from the image, where the other
// channels are b, c and d floats behind the first one. `put` writes it to a crop, where each channel is `step` floats behind
// the one before.
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

static inline void get(float& pixel, const float* from, long, long, long) { pixel = *from; }
static inline void get(Four& pixel, const float* from, long b, long c, long d) {
  pixel = (Four){*from, from[b], from[c], from[d]};
}

static inline void put(float* to, long, long, float pixel) { *to = pixel; }
static inline void put(float* to, long channels, long step, Four pixel) {
  to[0] = pixel[0];
  if (channels > 1) to[step] = pixel[1];
  if (channels > 2) to[2 * step] = pixel[2];
  if (channels > 3) to[3 * step] = pixel[3];
}

// Sample a crop at the points start, start + 1, ...: one vector of them, or as many as there are. `copy` has the channels of
// the image from `first` on.
template <class Pixel>
static inline void sample_vector(const Sampling& s, long crop, long start, long first, const Pixel* copy) {
  const long stride = s.width + 2 * MARGIN, count = std::min((long)LANES, s.area - start);
  Int before[2];  // the pixel before each point, along both axes, counted from the margin on
  Vec behind[2];  // how far the point lies behind this pixel, from 0 to 1
  for (long axis = 0; axis < 2; axis++) {
    const long length = axis ? s.height : s.width;
    const Vec lowest = fill(s.edge ? 0 : -MARGIN), highest = fill(s.edge ? length - 1 : length);
    Vec position = (load_first(s.grid + (axis * s.crops + crop) * s.area + start, count) + 1) * (length / 2.f) - 0.5f;
    position = position > lowest ? position : lowest;  // also if it is NaN
    position = position < highest ? position : highest;
    before[axis] = __builtin_convertvector(position + (float)MARGIN, Int);
    behind[axis] = position - __builtin_convertvector(before[axis] - MARGIN, Vec);
  }
  const Int corner = before[1] * (int)stride + before[0];
  int corners[LANES];
  float right[LANES], low[LANES];
  memcpy(corners, &corner, sizeof corner), store(right, behind[0]), store(low, behind[1]);
  float* to = s.out + (crop * s.channels + first) * s.area + start;
  for (long i = 0; i < count; i++) {
    const Pixel* p = copy + corners[i];
    const float left = 1 - right[i], high = 1 - low[i];
    const Pixel above = p[0] * left + p[1] * right[i], below = p[stride] * left + p[stride + 1] * right[i];
    put(to + i, s.channels - first, s.area, above * high + below * low[i]);
  }
}

// Sample all crops of the images from `begin` to `end` - 1.
template <class Pixel>
static void sample_images(const Sampling& s, long begin, long end) {
  const long height = s.height, width = s.width, stride = width + 2 * MARGIN, channels = sizeof(Pixel) / sizeof(float);
  std::vector<Pixel> copy((height + 2 * MARGIN) * stride);
  for (long image = begin; image < end; image++)
    for (long first = 0; first < s.channels; first += channels) {
      const float* from = s.pixels + (image * s.channels + first) * height * width;
      auto place = [&](long c) { return std::min(c, s.channels - first - 1) * height * width; };  // repeats the last channel
      const long b = place(1), c = place(2), d = place(3);
      for (long y = 0; y < height; y++) {
        Pixel* row = copy.data() + (y + MARGIN) * stride + MARGIN;
        for (long x = 0; x < width; x++, from++) get(row[x], from, b, c, d);
      }
      for (long crop = image; crop < s.crops; crop += s.images)
        for (long start = 0; start < s.area; start += LANES) sample_vector(s, crop, start, first, copy.data());
    }
}

// --------------------------------------------------------------------------------------------------------- colors and blur

// For each pixel of an image: pixel = matrix * pixel + offset, clipped to the range from `low` to `high`.
static void recolor(float* __restrict red, float* __restrict green, float* __restrict blue, long pixels, const float* m,
                    float offset, float low, float high) {
  auto clipped = [=](float value) { return value < low ? low : value > high ? high : value; };  // NaN stays NaN
  for (long i = 0; i < pixels; i++) {
    const float r = red[i], g = green[i], b = blue[i];
    red[i] = clipped(m[0] * r + m[1] * g + m[2] * b + offset);
    green[i] = clipped(m[3] * r + m[4] * g + m[5] * b + offset);
    blue[i] = clipped(m[6] * r + m[7] * g + m[8] * b + offset);
  }
}

// The weights of a Gaussian filter along one axis: `of[d]` for pixels at the distance d, up to the distance `reach`. `share[i]`
// is 1 / the sum of the weights of all pixels inside the image that are averaged at pixel i.
struct Weights {
  long reach = 0;
  std::vector<float> of, share;

  Weights(long length, float sigma) : share(length + LANES) {
    for (long d = 0; d < length; d++) {
      const float exponent = d * d / (2 * sigma * sigma);
      if (d && !(exponent < 17)) break;  // the rest would be lost in rounding
      of.push_back(std::exp(-exponent)), reach = d;
    }
    for (long i = 0; i < length; i++) {
      float sum = 0;
      for (long d = -std::min(reach, i); d <= std::min(reach, length - 1 - i); d++) sum += of[std::abs(d)];
      share[i] = 1 / sum;
    }
  }

  // Return the weighted sums of a vector of neighboring pixels. The next pixel along the axis is `step` floats away.
  Vec sums(const float* pixels, long step) const {
    Vec sum = load(pixels) * of[0];
    for (long d = 1; d <= reach; d++) sum += (load(pixels - d * step) + load(pixels + d * step)) * of[d];
    return sum;
  }
};

// Blur an image in place, first the rows of each channel and then its columns, on copies with black margins. The rows of the
// copies have whole vectors.
static void blur(float* pixels, long channels, long height, long width, float sigma) {
  const Weights down(height, sigma), across(width, sigma);
  const long stride = (width + LANES - 1) / LANES * LANES;
  std::vector<float> memory(2 * across.reach + stride + (height + 2 * down.reach) * stride);
  float *row = memory.data() + across.reach, *rows = row + stride + across.reach + down.reach * stride;
  for (long c = 0; c < channels; c++, pixels += height * width) {
    for (long y = 0; y < height; y++) {
      memcpy(row, pixels + y * width, width * sizeof(float));
      for (long x = 0; x < width; x += LANES)
        store(rows + y * stride + x, across.sums(row + x, 1) * load(across.share.data() + x));
    }
    for (long y = 0; y < height; y++)
      for (long x = 0; x < width; x += LANES)
        store_first(pixels + y * width + x, down.sums(rows + y * stride + x, stride) * down.share[y], width - x);
  }
}

extern "C" {

void views_sample(const Sampling* sampling) {
  const Sampling& s = *sampling;
  share_in_threads(s.images, s.threads, [&](long begin, long end, long) {
    if (s.channels < 3) sample_images<float>(s, begin, end);
    else sample_images<Four>(s, begin, end);
  });
}

// Image number index[i] of `from` is changed, and written to `to`, which may be the same memory. Its matrix begins at
// matrix[i * step]. `index` and `offset` may be null: for image i, and for no offset.
void views_recolor(const float* from, float* to, const int64_t* index, long count, long pixels, const float* matrix, long step,
                   const float* offset, float low, float high, long threads) {
  share_in_threads(count, threads, [&](long begin, long end, long) {
    for (long i = begin; i < end; i++) {
      const long start = (index ? index[i] : i) * 3 * pixels;
      float* image = to + start;
      if (from != to) memcpy(image, from + start, 3 * pixels * sizeof(float));
      recolor(image, image + pixels, image + 2 * pixels, pixels, matrix + i * step, offset ? offset[i] : 0, low, high);
    }
  });
}

// Blur image number index[i] in place with the standard deviation sigma[i], in pixels.
void views_blur(float* images, const int64_t* index, const float* sigma, long count, long channels, long height, long width,
                long threads) {
  share_in_threads(count, threads, [&](long begin, long end, long) {
    for (long i = begin; i < end; i++) blur(images + index[i] * channels * height * width, channels, height, width, sigma[i]);
  });
}
}
