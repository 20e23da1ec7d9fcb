// Elementary functions on vectors. A NaN argument makes the result NaN: max and min return
// their second operand if one operand is NaN, and constants are always the first operand.
// tests/cpp/test_rowwise.cpp checks the error bounds below. The coefficients of the polynomials
// come from weighted least-squares fits. The weights were adjusted until all local maxima
// of the error were equal, which makes the largest error as small as possible.
#pragma once
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE F clamp(F x, float lo, float hi) { return min(set1(hi), max(set1(lo), x)); }

// Sets n = round(x / ln 2), and returns exp(f) for f = x - n ln 2, computed as 1 + f + f^2 p(f).
// The error is below 1.1e-7 for |f| <= ln(2) / 2. The product n ln 2 is subtracted in two steps,
// with ln 2 as the sum of two constants, because n times the first constant is exact.
CPUSERVE_INLINE F exp_reduced(F x, F* n) {
  *n = round(mul(x, set1(1.44269504f)));
  const F f = fnma(*n, set1(-2.12194440e-4f), fnma(*n, set1(0.693359375f), x));
  F p = fma(set1(8.312501489e-3f), f, set1(4.189033234e-2f));
  p = fma(p, f, set1(1.666711539e-1f));
  p = fma(p, f, set1(4.999923030e-1f));
  p = fma(p, f, set1(1.0f));
  return fma(p, f, set1(1.0f));
}

// Returns exp(x) for every x: infinity above 88.8, denormals and 0 for very negative x.
// The relative error is below 2.5e-7 where the result is a normal number.
CPUSERVE_INLINE F exp(F x) {
  F n;
  const F p = exp_reduced(clamp(x, -104.0f, 89.0f), &n);
  return scale2_far(p, n);
}

// Returns 2^f within 1.2e-7 for |f| <= 1/2, and exactly 1 at 0.
CPUSERVE_INLINE F exp2_reduced(F f) {
  F p = fma(set1(1.326464545e-3f), f, set1(9.671576589e-3f));
  p = fma(p, f, set1(5.550734517e-2f));
  p = fma(p, f, set1(2.402224111e-1f));
  p = fma(p, f, set1(6.931469769e-1f));
  return fma(p, f, set1(1.0f));
}

// A coefficient c[i] of the polynomial 1 + f (c[0] + f (c[1] + ...)): `nearest` is for f
// in [-1/2, 1/2], and `down` is for f in [0, 1], at ISA levels where split_exponent rounds down.
struct Fit {
  float nearest, down;
};
template <int N>
CPUSERVE_INLINE F exp2_fit(F f, const Fit (&c)[N]) {
  F p = set1(kSplitsDown ? c[N - 1].down : c[N - 1].nearest);
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; i--) p = fma(p, f, set1(kSplitsDown ? c[i].down : c[i].nearest));
  return fma(p, f, set1(1.0f));
}

// Returns 2^x for x <= 0, for softmax, with fewer operations than exp and a relative error < 2e-7.
// For x below -125 the result is 2^-125, so that results are never denormal.
// A term of 2^-125 does not change a sum that contains a 1, as the sums of softmax do.
CPUSERVE_INLINE F exp2_nonpositive(F x) {
  constexpr Fit kFit[] = {{6.931469769e-1f, 6.931513119e-1f},
                          {2.402224111e-1f, 2.401644492e-1f},
                          {5.550734517e-2f, 5.579991640e-2f},
                          {9.671576589e-3f, 9.017025749e-3f},
                          {1.326464545e-3f, 1.867132216e-3f}};
  F e;
  const F f = split_exponent(max(set1(-125.0f), x), &e);
  return add_exponent(exp2_fit(f, kFit), e);
}

// Returns exp(g) for g <= 0, within 4e-7: exactly 1 at 0, and never below 2^-125.
// decayed() takes two thirds of the operations of exp().
CPUSERVE_INLINE F decayed(F g) { return exp2_nonpositive(mul(g, set1(1.44269504f))); }

// Does the same as exp2_nonpositive with one operation fewer.
// The relative error is below 3.2e-6, which is enough for results that are rounded to bf16.
CPUSERVE_INLINE F exp2_coarse(F x) {
  constexpr Fit kFit[] = {{6.931241932e-1f, 6.930448421e-1f},
                          {2.402409863e-1f, 2.412802265e-1f},
                          {5.590642669e-2f, 5.224242773e-2f},
                          {9.582852736e-3f, 1.342671320e-2f}};
  F e;
  const F f = split_exponent(max(set1(-125.0f), x), &e);
  return add_exponent(exp2_fit(f, kFit), e);
}

// Returns 2^x for every x, with the range and accuracy of exp.
CPUSERVE_INLINE F exp2(F x) {
  x = clamp(x, -151.0f, 129.0f);
  const F n = round(x);
  return scale2_far(exp2_reduced(sub(x, n)), n);
}

CPUSERVE_INLINE F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Returns log(1 + exp(x)) within 4e-7, as max(x, 0) + log(1 + y) for y = exp(-|x|).
// log(1 + y) is the series 2 s (1 + s^2 / 3 + s^4 / 5 + ...) for s = y / (2 + y) <= 1/3.
CPUSERVE_INLINE F softplus(F x) {
  const F y = exp(min(x, sub(zero(), x)));
  const F s = div(y, add(set1(2.0f), y)), u = mul(s, s);
  F p = fma(set1(2.0f / 13), u, set1(2.0f / 11));
  p = fma(p, u, set1(2.0f / 9));
  p = fma(p, u, set1(2.0f / 7));
  p = fma(p, u, set1(2.0f / 5));
  p = fma(p, u, set1(2.0f / 3));
  p = fma(p, u, set1(2.0f));
  return fma(p, s, max(zero(), x));
}

// Computes tanh(x) as x p(x^2) / q(x^2), with a relative error below 4e-7; tanh(9) rounds to 1.
CPUSERVE_INLINE F tanh(F x) {
  x = clamp(x, -9.0f, 9.0f);
  const F u = mul(x, x);
  F p = fma(set1(1.335467969e-8f), u, set1(2.060909695e-5f));
  p = fma(p, u, set1(3.495589074e-3f));
  p = fma(p, u, set1(1.338102645e-1f));
  p = fma(p, u, set1(9.999999795e-1f));
  F q = fma(set1(7.776566200e-7f), u, set1(3.285636328e-4f));
  q = fma(q, u, set1(2.587698585e-2f));
  q = fma(q, u, set1(4.671434205e-1f));
  q = fma(q, u, set1(1.0f));
  return clamp(div(mul(x, p), q), -1.0f, 1.0f);
}

// Computes erf(x) as x p(x^2) / q(x^2), with a relative error below 5e-7; erf(3.95) is 1 - 2.4e-8.
CPUSERVE_INLINE F erf(F x) {
  x = clamp(x, -3.95f, 3.95f);
  const F u = mul(x, x);
  F p = fma(set1(2.025909626e-6f), u, set1(2.846879952e-4f));
  p = fma(p, u, set1(3.808165903e-3f));
  p = fma(p, u, set1(5.287545993e-2f));
  p = fma(p, u, set1(1.915503901e-1f));
  p = fma(p, u, set1(1.128379144f));
  F q = fma(set1(3.783183152e-5f), u, set1(1.170727134e-3f));
  q = fma(q, u, set1(1.505509816e-2f));
  q = fma(q, u, set1(1.145596593e-1f));
  q = fma(q, u, set1(5.030897889e-1f));
  q = fma(q, u, set1(1.0f));
  return clamp(div(mul(x, p), q), -1.0f, 1.0f);
}

}  // namespace CPUSERVE_NS
