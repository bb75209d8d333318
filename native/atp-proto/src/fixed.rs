// SPDX-License-Identifier: Apache-2.0
//! Fixed point (ATP section 3.6): value * s rounded to nearest as int32 on the wire, and the raw 32-bit words beside it.

use half::{bf16, f16};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    Float32,
    Float16,
    Bfloat16,
    Int32,
}

impl Dtype {
    /// Parse the name that the Python API uses.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "float32" => Self::Float32,
            "float16" => Self::Float16,
            "bfloat16" => Self::Bfloat16,
            "int32" => Self::Int32,
            _ => return None,
        })
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Int32 => "int32",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
        }
    }

    /// The data type that raw packets of this tensor carry.
    #[must_use]
    pub fn raw_type(self) -> u16 {
        if self == Self::Int32 { RAW_INT32 } else { RAW_FLOAT32 }
    }
}

/// `aggregatorIndex` of raw packets: float32 words.
pub const RAW_FLOAT32: u16 = 0;
/// `aggregatorIndex` of raw packets: int32 words.
pub const RAW_INT32: u16 = 1;
/// `aggregatorIndex` of raw packets from the parameter server: a notice, see docs/protocol.md.
pub const RAW_NOTICE: u16 = 2;

/// Adding and taking away 1.5 * 2^52 rounds a double to the nearest integer (ties to even) in two vector
/// instructions, and leaves that integer in the low 32 bits of the sum.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Largest magnitude that is sent as an integer: 2^31 - 1 marks saturation.
pub const LIMIT: i32 = i32::MAX - 1;

#[inline(always)]
fn fixed_loop<const N: usize>(
    src: &[u8],
    out: &mut [u8],
    scale: f64,
    limit: i32,
    load: impl Fn([u8; N]) -> f64,
) -> bool {
    let mut ok = true;
    let limit = f64::from(limit);
    let (items, _) = src.as_chunks::<N>();
    let (words, _) = out.as_chunks_mut::<4>();
    for (item, word) in items.iter().zip(words) {
        let sum = load(*item) * scale + ROUND;
        let rounded = sum - ROUND;
        ok &= rounded.abs() <= limit;
        *word = (sum.to_bits() as u32).to_be_bytes();
    }
    ok
}

/// Encode the elements `src` as big-endian int32 into `out`, zeros after their end. `scale` is not used for int32.
/// False when a value has no integer of magnitude up to `limit` (at most `LIMIT`), or is NaN or Inf: the packet must go raw
/// and `out` is not to be sent.
#[must_use]
pub fn encode(dtype: Dtype, src: &[u8], scale: f64, limit: i32, out: &mut [u8]) -> bool {
    let used = src.len() / dtype.size() * 4;
    let (head, tail) = out.split_at_mut(used);
    tail.fill(0);
    match dtype {
        Dtype::Float32 => fixed_loop(src, head, scale, limit, |b| f64::from(f32::from_ne_bytes(b))),
        Dtype::Float16 => fixed_loop(src, head, scale, limit, |b| f16::from_ne_bytes(b).to_f64()),
        Dtype::Bfloat16 => {
            fixed_loop(src, head, scale, limit, |b| f64::from(f32::from_bits(u32::from(u16::from_ne_bytes(b)) << 16)))
        }
        Dtype::Int32 => {
            let mut ok = true;
            let (items, _) = src.as_chunks::<4>();
            let (words, _) = head.as_chunks_mut::<4>();
            for (item, word) in items.iter().zip(words) {
                let v = i32::from_ne_bytes(*item);
                ok &= v.unsigned_abs() <= limit.unsigned_abs();
                *word = v.to_be_bytes();
            }
            ok
        }
    }
}

/// Encode the elements as raw words: int32 as it is, every float type as float32.
pub fn encode_raw(dtype: Dtype, src: &[u8], out: &mut [u8]) {
    let used = src.len() / dtype.size() * 4;
    let (head, tail) = out.split_at_mut(used);
    tail.fill(0);
    let (words, _) = head.as_chunks_mut::<4>();
    match dtype {
        Dtype::Float32 | Dtype::Int32 => {
            for (item, word) in src.as_chunks::<4>().0.iter().zip(words) {
                *word = u32::from_ne_bytes(*item).to_be_bytes();
            }
        }
        Dtype::Float16 => {
            for (item, word) in src.as_chunks::<2>().0.iter().zip(words) {
                *word = f16::from_ne_bytes(*item).to_f32().to_be_bytes();
            }
        }
        Dtype::Bfloat16 => {
            for (item, word) in src.as_chunks::<2>().0.iter().zip(words) {
                *word = bf16::from_ne_bytes(*item).to_f32().to_be_bytes();
            }
        }
    }
}

/// A float32 from which rounding on to fewer bits gives what rounding `x` at once would give: inexact results get an odd
/// last bit (Boldo and Melquiond, "When double rounding is odd").
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    if back == x || x.is_nan() || bits & 1 == 1 {
        near
    } else if back.abs() > x.abs() {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

#[inline(always)]
fn store_floats(dtype: Dtype, payload: &[u8], dst: &mut [u8], value: impl Fn([u8; 4]) -> f64) {
    let words = payload.as_chunks::<4>().0;
    match dtype {
        Dtype::Float32 => {
            for (item, word) in dst.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *item = (value(*word) as f32).to_ne_bytes();
            }
        }
        Dtype::Float16 => {
            for (item, word) in dst.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *item = f16::from_f32(round_to_odd(value(*word))).to_ne_bytes();
            }
        }
        Dtype::Bfloat16 => {
            for (item, word) in dst.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *item = bf16::from_f32(round_to_odd(value(*word))).to_ne_bytes();
            }
        }
        Dtype::Int32 => unreachable!("integers are copied"),
    }
}

/// Decode a fixed-point result into elements. `divisor` is 1 for a sum, the number of workers for a mean (floats only).
pub fn decode(dtype: Dtype, payload: &[u8], scale: f64, divisor: f64, dst: &mut [u8]) {
    if dtype == Dtype::Int32 {
        copy_words(payload, dst);
    } else if divisor == 1.0 {
        store_floats(dtype, payload, dst, |w| f64::from(i32::from_be_bytes(w)) / scale);
    } else {
        store_floats(dtype, payload, dst, |w| f64::from(i32::from_be_bytes(w)) / scale / divisor);
    }
}

/// Decode a raw result (float32 or int32 words, as `dtype` has it) into elements.
pub fn decode_raw(dtype: Dtype, payload: &[u8], divisor: f64, dst: &mut [u8]) {
    if dtype == Dtype::Int32 {
        copy_words(payload, dst);
    } else {
        store_floats(dtype, payload, dst, |w| f64::from(f32::from_be_bytes(w)) / divisor);
    }
}

fn copy_words(payload: &[u8], dst: &mut [u8]) {
    for (item, word) in dst.as_chunks_mut::<4>().0.iter_mut().zip(payload.as_chunks::<4>().0) {
        *item = u32::from_be_bytes(*word).to_ne_bytes();
    }
}

/// The switches' addition: saturating, and sticky at both ends (maximum wins over minimum).
#[inline(always)]
#[must_use]
pub fn sticky_add(a: i32, b: i32) -> i32 {
    let sum = a.saturating_add(b);
    let sum = if (a == i32::MIN) | (b == i32::MIN) { i32::MIN } else { sum };
    if (a == i32::MAX) | (b == i32::MAX) { i32::MAX } else { sum }
}

/// Add the big-endian payload to `sum`.
pub fn accumulate(sum: &mut [i32], payload: &[u8]) {
    for (s, word) in sum.iter_mut().zip(payload.as_chunks::<4>().0) {
        *s = sticky_add(*s, i32::from_be_bytes(*word));
    }
}

/// Whether a big-endian payload holds a saturated value.
#[must_use]
pub fn is_saturated(payload: &[u8]) -> bool {
    let mut hit = false;
    for word in payload.as_chunks::<4>().0 {
        let v = i32::from_be_bytes(*word);
        hit |= (v == i32::MAX) | (v == i32::MIN);
    }
    hit
}

/// Sum raw gradients in rank order: float32 in float64 rounded once, int32 wrapped as torch does.
pub fn sum_raw<'a>(raw_type: u16, parts: impl Iterator<Item = &'a [u8]> + Clone, out: &mut [u8]) {
    for (i, word) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let words = parts.clone().map(|p| p.as_chunks::<4>().0[i]);
        *word = if raw_type == RAW_INT32 {
            // i64 cannot overflow here: at most 1,024 terms of 32 bits.
            let sum: i64 = words.map(|w| i64::from(i32::from_be_bytes(w))).sum();
            (sum as i32).to_be_bytes()
        } else {
            let sum = words.fold(0.0f64, |acc, w| acc + f64::from(f32::from_be_bytes(w)));
            (sum as f32).to_be_bytes()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn f32s(v: &[f32]) -> Vec<u8> {
        v.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    #[test]
    fn rounds_to_nearest() {
        let mut out = [0u8; 32];
        let src = f32s(&[0.5, 1.5, -0.5, -1.5, 2.4, -2.6, 0.0]);
        assert!(encode(Dtype::Float32, &src, 1.0, LIMIT, &mut out));
        let got: Vec<i32> = out.as_chunks::<4>().0.iter().map(|w| i32::from_be_bytes(*w)).collect();
        assert_eq!(got, [0, 2, 0, -2, 2, -3, 0, 0]);
    }

    #[test]
    fn refuses_what_has_no_integer() {
        let mut out = [0u8; 4];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 21.474_838, -21.474_838, f32::MAX] {
            assert!(!encode(Dtype::Float32, &bad.to_ne_bytes(), 1e8, LIMIT, &mut out), "{bad}");
        }
        assert!(encode(Dtype::Float32, &21.474_834_f32.to_ne_bytes(), 1e8, LIMIT, &mut out));
        // 2^31 - 2 is the last integer that is sent.
        assert!(!encode(Dtype::Float32, &1.0f32.to_ne_bytes(), 2_147_483_646.6, LIMIT, &mut out));
        assert!(encode(Dtype::Float32, &1.0f32.to_ne_bytes(), 2_147_483_646.4, LIMIT, &mut out));
        assert!(!encode(Dtype::Int32, &i32::MAX.to_ne_bytes(), 1.0, LIMIT, &mut out));
        assert!(!encode(Dtype::Int32, &i32::MIN.to_ne_bytes(), 1.0, LIMIT, &mut out));
    }

    #[test]
    fn sticky_at_both_ends() {
        assert_eq!(sticky_add(i32::MAX, -5), i32::MAX);
        assert_eq!(sticky_add(-5, i32::MIN), i32::MIN);
        assert_eq!(sticky_add(i32::MIN, i32::MAX), i32::MAX);
        assert_eq!(sticky_add(2_000_000_000, 2_000_000_000), i32::MAX);
        assert_eq!(sticky_add(3, -4), -1);
    }

    #[test]
    fn half_types_round_once() {
        // Just above the middle of two float16 (bfloat16) values: rounding to float32 first would meet the middle.
        assert_eq!(
            f16::from_f32(round_to_odd(1.0 + 2f64.powi(-11) + 2f64.powi(-40))),
            f16::from_f32(1.0 + 2f32.powi(-10))
        );
        assert_eq!(f16::from_f32(round_to_odd(1.0 + 2f64.powi(-11) - 2f64.powi(-40))), f16::from_f32(1.0));
        assert_eq!(
            bf16::from_f32(round_to_odd(-1.0 - 2f64.powi(-8) - 2f64.powi(-40))),
            bf16::from_f32(-1.0 - 2f32.powi(-7))
        );
        assert_eq!(round_to_odd(f64::MAX), f32::MAX);
        assert!(round_to_odd(f64::NAN).is_nan());
        assert_eq!(round_to_odd(f64::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn raw_sums_as_specified() {
        let a = 1e30f32.to_be_bytes();
        let b = 1.0f32.to_be_bytes();
        let c = (-1e30f32).to_be_bytes();
        let mut out = [0u8; 4];
        sum_raw(RAW_FLOAT32, [&a[..], &b[..], &c[..]].into_iter(), &mut out);
        assert_eq!(f32::from_be_bytes(out), (1e30f32 as f64 + 1.0 - 1e30f32 as f64) as f32);
        let m = i32::MAX.to_be_bytes();
        let one = 1i32.to_be_bytes();
        sum_raw(RAW_INT32, [&m[..], &one[..]].into_iter(), &mut out);
        assert_eq!(i32::from_be_bytes(out), i32::MIN);
    }

    proptest! {
        #[test]
        fn fixed_point_error_is_half_a_step(x in -20.0f32..20.0) {
            let mut out = [0u8; 4];
            prop_assert!(encode(Dtype::Float32, &x.to_ne_bytes(), 1e8, LIMIT, &mut out));
            let i = i32::from_be_bytes(out);
            prop_assert!((f64::from(i) - f64::from(x) * 1e8).abs() <= 0.5);
            let mut back = [0u8; 4];
            decode(Dtype::Float32, &out, 1e8, 1.0, &mut back);
            prop_assert_eq!(f32::from_ne_bytes(back), (f64::from(i) / 1e8) as f32);
        }

        #[test]
        fn raw_round_trip_of_half_types(bits: u16) {
            for dtype in [Dtype::Float16, Dtype::Bfloat16] {
                let mut word = [0u8; 4];
                encode_raw(dtype, &bits.to_ne_bytes(), &mut word);
                let mut back = [0u8; 2];
                decode_raw(dtype, &word, 1.0, &mut back);
                let nan = f32::from_be_bytes(word).is_nan();
                prop_assert!(nan || u16::from_ne_bytes(back) == bits);
            }
        }

        #[test]
        fn sticky_add_commutes(a: i32, b: i32) {
            prop_assert_eq!(sticky_add(a, b), sticky_add(b, a));
        }
    }

    #[test]
    fn a_smaller_limit_holds_for_every_type() {
        let mut out = [0u8; 4];
        for (x, fits) in [(5.0f32, true), (-5.0, true), (5.4, true), (5.6, false), (-6.0, false)] {
            assert_eq!(encode(Dtype::Float32, &x.to_ne_bytes(), 1.0, 5, &mut out), fits, "{x}");
            assert_eq!(encode(Dtype::Float16, &f16::from_f32(x).to_ne_bytes(), 1.0, 5, &mut out), fits, "{x}");
            assert_eq!(encode(Dtype::Bfloat16, &bf16::from_f32(x).to_ne_bytes(), 1.0, 5, &mut out), fits, "{x}");
        }
        for (v, fits) in [(5, true), (-5, true), (6, false), (-6, false), (i32::MIN, false), (i32::MAX, false)] {
            assert_eq!(encode(Dtype::Int32, &v.to_ne_bytes(), 1.0, 5, &mut out), fits, "{v}");
        }
    }
}
