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

    const ALL: [Self; 4] = [Self::Float32, Self::Float16, Self::Bfloat16, Self::Int32];

    /// Its number on the control channel, in descriptors and in the session protocol.
    #[must_use]
    pub fn number(self) -> u8 {
        Self::ALL.iter().position(|d| *d == self).unwrap_or(0) as u8
    }

    /// The opposite of `number`.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
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
/// `aggregatorIndex` of packets of the control channel, see `control`.
pub const RAW_CONTROL: u16 = 3;

/// Adding and taking away 1.5 * 2^52 rounds a double to the nearest integer (ties to even) in two vector
/// instructions, and leaves that integer in the low 32 bits of the sum.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Largest magnitude that is sent as an integer: 2^31 - 1 marks saturation.
pub const LIMIT: i32 = i32::MAX - 1;

/// What became of the elements of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Every element has an integer. Otherwise the packet must go raw, and what was written is not to be sent.
    pub fits: bool,
    /// Elements that are not 0 and whose integer is 0.
    pub zeroed: u32,
}

#[inline(always)]
fn fixed_loop<const N: usize>(
    src: &[u8],
    out: &mut [u8],
    scale: f64,
    limit: i32,
    load: impl Fn([u8; N]) -> f64,
) -> Encoded {
    let mut ok = true;
    let mut zeroed = 0u32;
    let limit = f64::from(limit);
    let (items, _) = src.as_chunks::<N>();
    let (words, _) = out.as_chunks_mut::<4>();
    for (item, word) in items.iter().zip(words) {
        let x = load(*item);
        let sum = x * scale + ROUND;
        let rounded = sum - ROUND;
        ok &= rounded.abs() <= limit;
        zeroed += u32::from((rounded == 0.0) & (x != 0.0));
        *word = (sum.to_bits() as u32).to_be_bytes();
    }
    Encoded { fits: ok, zeroed }
}

/// Encode the elements `src` as big-endian int32 into `out`, zeros after their end. `scale` is not used for int32.
/// `fits` is false when a value has no integer of magnitude up to `limit` (at most `LIMIT`), or is NaN or Inf.
#[must_use]
pub fn encode(dtype: Dtype, src: &[u8], scale: f64, limit: i32, out: &mut [u8]) -> Encoded {
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
            Encoded { fits: ok, zeroed: 0 }
        }
    }
}

/// Elements that are NaN or Inf, and finite ones whose integer would be beyond `limit`: why a packet goes raw.
#[must_use]
pub fn misfits(dtype: Dtype, src: &[u8], scale: f64, limit: i32) -> (u64, u64) {
    let mut counts = (0, 0);
    let mut count = |x: f64| {
        if !x.is_finite() {
            counts.0 += 1;
        } else if (x * scale).round_ties_even().abs() > f64::from(limit) {
            counts.1 += 1;
        }
    };
    match dtype {
        Dtype::Float32 => src.as_chunks::<4>().0.iter().for_each(|b| count(f64::from(f32::from_ne_bytes(*b)))),
        Dtype::Float16 => src.as_chunks::<2>().0.iter().for_each(|b| count(f16::from_ne_bytes(*b).to_f64())),
        Dtype::Bfloat16 => src.as_chunks::<2>().0.iter().for_each(|b| count(bf16::from_ne_bytes(*b).to_f64())),
        Dtype::Int32 => {
            for b in src.as_chunks::<4>().0 {
                counts.1 += u64::from(i32::from_ne_bytes(*b).unsigned_abs() > limit.unsigned_abs());
            }
        }
    }
    counts
}

/// The biased float32 exponent of the largest finite magnitude: 0 when there is none above the subnormal numbers, else
/// every finite |x| is below 2^(exponent - 126). 0 for int32.
#[must_use]
pub fn largest_exponent(dtype: Dtype, src: &[u8]) -> u8 {
    /// Largest magnitude as an integer, of values whose bits from `infinite` on are no number. In lanes, and signed: that is
    /// what every x86-64 has vector instructions for.
    #[inline(always)]
    fn largest<const N: usize>(src: &[u8], infinite: i32, load: impl Fn([u8; N]) -> i32) -> u32 {
        const LANES: usize = 16;
        let finite = |item: &[u8; N]| {
            let bits = load(*item);
            if bits < infinite { bits } else { 0 }
        };
        let (groups, rest) = src.as_chunks::<N>().0.as_chunks::<LANES>();
        let mut most = [0i32; LANES];
        for group in groups {
            for (lane, item) in most.iter_mut().zip(group) {
                *lane = (*lane).max(finite(item));
            }
        }
        rest.iter().map(finite).chain(most).max().unwrap_or(0) as u32
    }
    let bits = match dtype {
        Dtype::Float32 => largest(src, 0x7f80_0000, |b| i32::from_ne_bytes(b) & 0x7fff_ffff),
        Dtype::Bfloat16 => largest(src, 0x7f80, |b| i32::from(u16::from_ne_bytes(b)) & 0x7fff) << 16,
        Dtype::Float16 => {
            let half = largest(src, 0x7c00, |b| i32::from(u16::from_ne_bytes(b)) & 0x7fff);
            f16::from_bits(half as u16).to_f32().to_bits()
        }
        Dtype::Int32 => 0,
    };
    (bits >> 23) as u8
}

/// The largest power of two with which neither one value of that exponent nor a sum of `ranks` of them leaves `limit`.
///
/// Every finite float32 below 2^(e - 126) is at most (1 - 2^-24) of it, so the product with 2^j / 2^(e - 126) is at most
/// 2^j - 2^(j - 24), which is an integer from j = 24 on.
#[must_use]
pub fn scale_of(exponent: u8, ranks: usize, limit: i32) -> f64 {
    let most = |j: i32| (1i64 << j) - if j >= 24 { 1 << (j - 24) } else { 0 };
    let fits = |j: &i32| most(*j) <= i64::from(limit) && most(*j) * ranks as i64 <= i64::from(LIMIT);
    let j = (0..=31).rev().find(fits).unwrap_or(0);
    2f64.powi(j + 126 - i32::from(exponent.clamp(0, 254)))
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

/// Sum elements of several ranks, each in the byte order of the wire (little endian), in rank order: floats in float64,
/// divided and rounded once; int32 wraps as in torch.
pub fn sum_inline(dtype: Dtype, parts: &[&[u8]], divisor: f64, out: &mut [u8]) {
    let half = |x: f64| round_to_odd(x);
    for i in 0..out.len() / dtype.size() {
        let size = dtype.size();
        let at = i * size..(i + 1) * size;
        let words = parts.iter().map(|p| &p[at.clone()]);
        let target = &mut out[at.clone()];
        match dtype {
            Dtype::Int32 => {
                let sum = words.fold(0i32, |a, w| a.wrapping_add(i32::from_le_bytes([w[0], w[1], w[2], w[3]])));
                target.copy_from_slice(&sum.to_le_bytes());
            }
            Dtype::Float32 => {
                let sum: f64 = words.map(|w| f64::from(f32::from_le_bytes([w[0], w[1], w[2], w[3]]))).sum();
                target.copy_from_slice(&((sum / divisor) as f32).to_le_bytes());
            }
            Dtype::Float16 => {
                let sum: f64 = words.map(|w| f16::from_le_bytes([w[0], w[1]]).to_f64()).sum();
                target.copy_from_slice(&f16::from_f32(half(sum / divisor)).to_le_bytes());
            }
            Dtype::Bfloat16 => {
                let sum: f64 = words.map(|w| bf16::from_le_bytes([w[0], w[1]]).to_f64()).sum();
                target.copy_from_slice(&bf16::from_f32(half(sum / divisor)).to_le_bytes());
            }
        }
    }
}

/// Turn the elements of a tensor from host order into wire order (little endian), or back.
pub fn swap_inline(dtype: Dtype, bytes: &mut [u8]) {
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
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
        assert!(encode(Dtype::Float32, &src, 1.0, LIMIT, &mut out).fits);
        let got: Vec<i32> = out.as_chunks::<4>().0.iter().map(|w| i32::from_be_bytes(*w)).collect();
        assert_eq!(got, [0, 2, 0, -2, 2, -3, 0, 0]);
    }

    #[test]
    fn refuses_what_has_no_integer() {
        let mut out = [0u8; 4];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 21.474_838, -21.474_838, f32::MAX] {
            assert!(!encode(Dtype::Float32, &bad.to_ne_bytes(), 1e8, LIMIT, &mut out).fits, "{bad}");
        }
        assert!(encode(Dtype::Float32, &21.474_834_f32.to_ne_bytes(), 1e8, LIMIT, &mut out).fits);
        // 2^31 - 2 is the last integer that is sent.
        assert!(!encode(Dtype::Float32, &1.0f32.to_ne_bytes(), 2_147_483_646.6, LIMIT, &mut out).fits);
        assert!(encode(Dtype::Float32, &1.0f32.to_ne_bytes(), 2_147_483_646.4, LIMIT, &mut out).fits);
        assert!(!encode(Dtype::Int32, &i32::MAX.to_ne_bytes(), 1.0, LIMIT, &mut out).fits);
        assert!(!encode(Dtype::Int32, &i32::MIN.to_ne_bytes(), 1.0, LIMIT, &mut out).fits);
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
            prop_assert!(encode(Dtype::Float32, &x.to_ne_bytes(), 1e8, LIMIT, &mut out).fits);
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
    fn counts_what_becomes_zero() {
        let mut out = [0u8; 16];
        let src = f32s(&[3e-9, -4e-9, 0.0, 6e-9]);
        assert_eq!(encode(Dtype::Float32, &src, 1e8, LIMIT, &mut out), Encoded { fits: true, zeroed: 2 });
        let src = f32s(&[f32::NAN, f32::INFINITY, 30.0, 1.0]);
        assert_eq!(misfits(Dtype::Float32, &src, 1e8, LIMIT), (2, 1));
    }

    #[test]
    fn an_exponent_bounds_every_finite_magnitude() {
        let of = |values: &[f32]| largest_exponent(Dtype::Float32, &f32s(values));
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&[0.0, 1e-40]), 0);
        assert_eq!(of(&[1.0, -0.5, f32::NAN, f32::INFINITY]), 127);
        assert_eq!(of(&[-2.0, 1.0]), 128);
        assert_eq!(of(&[f32::MAX]), 254);
        assert_eq!(largest_exponent(Dtype::Float16, &f16::from_f32(-0.75).to_ne_bytes()), 126);
        assert_eq!(largest_exponent(Dtype::Float16, &f16::from_bits(1).to_ne_bytes()), 103); // 2^-24
        assert_eq!(largest_exponent(Dtype::Bfloat16, &bf16::from_f32(3.0).to_ne_bytes()), 128);
        assert_eq!(largest_exponent(Dtype::Int32, &77i32.to_ne_bytes()), 0);
    }

    #[test]
    fn inline_sums_round_once() {
        let parts: [Vec<u8>; 2] = [f32s(&[1.0, 3e-9, 1e30]), f32s(&[2.0, 3e-9, -1e30])];
        let mut out = vec![0u8; 12];
        sum_inline(Dtype::Float32, &[&parts[0], &parts[1]], 1.0, &mut out);
        assert_eq!(out, f32s(&[3.0, 6e-9, 0.0]));
        sum_inline(Dtype::Float32, &[&parts[0], &parts[1]], 2.0, &mut out);
        assert_eq!(out, f32s(&[1.5, 3e-9, 0.0]));
        let ints: [[u8; 4]; 2] = [i32::MAX.to_ne_bytes(), 1i32.to_ne_bytes()];
        let mut out = vec![0u8; 4];
        sum_inline(Dtype::Int32, &[&ints[0], &ints[1]], 1.0, &mut out);
        assert_eq!(out, i32::MIN.to_ne_bytes());
    }

    proptest! {
        /// With the scale that the ranks agree on, no finite value goes raw and no sum saturates; the step is small.
        #[test]
        fn auto_scale_always_fits(exponents in proptest::collection::vec(-149i32..=127, 1..9), ranks in 1usize..=1024,
                                  negative: bool, small_limit: bool) {
            let values: Vec<f32> = exponents.iter().map(|e| {
                let m = if *e == 127 { f32::MAX } else { 2f32.powi(e + 1) * (1.0 - f32::EPSILON / 2.0) };
                if negative { -m } else { m }
            }).collect();
            let src = f32s(&values);
            let limit = if small_limit { LIMIT / ranks as i32 } else { LIMIT };
            let scale = scale_of(largest_exponent(Dtype::Float32, &src), ranks, limit);
            let mut out = vec![0u8; src.len()];
            prop_assert!(encode(Dtype::Float32, &src, scale, limit, &mut out).fits);
            let most = out.as_chunks::<4>().0.iter().map(|w| i64::from(i32::from_be_bytes(*w)).abs()).max().unwrap();
            prop_assert!(most * ranks as i64 <= i64::from(LIMIT));
            // And no bit is given away: a scale of twice that leaves the range.
            let largest = values.iter().fold(0f32, |a, v| a.max(v.abs()));
            if largest > 1e-37 {
                prop_assert!(most * 4 * ranks as i64 >= i64::from(LIMIT) - 4096 * ranks as i64, "{most} {ranks}");
            }
        }
    }

    #[test]
    fn a_smaller_limit_holds_for_every_type() {
        let mut out = [0u8; 4];
        for (x, fits) in [(5.0f32, true), (-5.0, true), (5.4, true), (5.6, false), (-6.0, false)] {
            assert_eq!(encode(Dtype::Float32, &x.to_ne_bytes(), 1.0, 5, &mut out).fits, fits, "{x}");
            assert_eq!(encode(Dtype::Float16, &f16::from_f32(x).to_ne_bytes(), 1.0, 5, &mut out).fits, fits, "{x}");
            assert_eq!(encode(Dtype::Bfloat16, &bf16::from_f32(x).to_ne_bytes(), 1.0, 5, &mut out).fits, fits, "{x}");
        }
        for (v, fits) in [(5, true), (-5, true), (6, false), (-6, false), (i32::MIN, false), (i32::MAX, false)] {
            assert_eq!(encode(Dtype::Int32, &v.to_ne_bytes(), 1.0, 5, &mut out).fits, fits, "{v}");
        }
    }
}
