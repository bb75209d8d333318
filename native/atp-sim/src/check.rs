// SPDX-License-Identifier: Apache-2.0
//! What tensors hold, and what their reduction must be: the exact integer sum of the fixed-point values, or the rawFloat
//! rule (float32 in rank order in float64; int32 wrapped), chunk by chunk.

use atp_proto::fixed::{self, Dtype};
use atp_proto::index::mix;
use atp_proto::op::Kind;

/// What kind of numbers an operation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// Sums never overflow.
    Small,
    /// Some sums overflow.
    Large,
    /// Here and there NaN, Inf, and numbers without an integer.
    Special,
}

/// One all-reduce.
#[derive(Clone, Copy, Debug)]
pub struct OpSpec {
    pub count: usize,
    pub dtype: Dtype,
    pub kind: Kind,
    pub flavour: Flavour,
}

#[inline]
fn float(flavour: Flavour, h: u64) -> f32 {
    let unit = (h as i32) as f32 / 2_147_483_648.0;
    match flavour {
        Flavour::Small => unit * 0.5,
        Flavour::Large if (h >> 32).is_multiple_of(256) => unit * 30.0,
        Flavour::Special if (h >> 32).is_multiple_of(512) => match h >> 41 & 7 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => 3e38,
            4 => -1e30,
            _ => unit * 1e4,
        },
        Flavour::Large | Flavour::Special => unit * 0.5,
    }
}

#[inline]
fn integer(flavour: Flavour, h: u64) -> i32 {
    match flavour {
        Flavour::Small => h as i32 >> 12,
        Flavour::Special if (h >> 32).is_multiple_of(512) => {
            [i32::MAX, i32::MIN, i32::MAX - 1, i32::MIN + 1][(h >> 41 & 3) as usize]
        }
        Flavour::Large if (h >> 32).is_multiple_of(256) => h as i32,
        Flavour::Large | Flavour::Special => h as i32 >> 12,
    }
}

/// Elements `from..to` of the tensor that `rank` brings; `salt` tells jobs and operations apart.
#[must_use]
pub fn source(op: &OpSpec, salt: u64, rank: usize, from: usize, to: usize) -> Vec<u8> {
    let base = mix(salt ^ mix(rank as u64 + 1));
    let hash = |i: usize| {
        // One multiplication and a fold: cheap, and different for every (job, operation, rank, element).
        let x = (base ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    let hash = |i: usize| {
        let x = hash(i);
        x ^ x >> 32
    };
    let mut out = vec![0u8; (to - from) * op.dtype.size()];
    match op.dtype {
        Dtype::Float32 => {
            for (i, w) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *w = float(op.flavour, hash(from + i)).to_ne_bytes();
            }
        }
        Dtype::Int32 => {
            for (i, w) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *w = integer(op.flavour, hash(from + i)).to_ne_bytes();
            }
        }
        Dtype::Float16 => {
            // Any bits: NaN and Inf among them only where they are wanted.
            for (i, w) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let h = hash(from + i);
                let special = op.flavour == Flavour::Special && (h >> 32).is_multiple_of(512);
                let exponent = if special { 31 } else { 10 + (h >> 16 & 3) };
                *w = ((h & 0x83ff | exponent << 10) as u16).to_ne_bytes();
            }
        }
        Dtype::Bfloat16 => {
            for (i, w) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let bits = float(op.flavour, hash(from + i)).to_bits();
                *w = ((bits >> 16) as u16).to_ne_bytes();
            }
        }
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    Fixed,
    Raw,
    /// Some order of additions saturates: both are right, but all ranks must get the same.
    Either,
}

/// What every rank must get.
pub struct Expected {
    fixed: Vec<u8>,
    /// By chunk; empty when all are `Fixed`.
    rules: Vec<Rule>,
    raw: Vec<Vec<u8>>,
    /// Bytes of a chunk of the tensor.
    chunk: usize,
}

impl Expected {
    #[must_use]
    pub fn new(op: &OpSpec, salt: u64, ranks: usize, values: usize, scale: f64) -> Self {
        let size = op.dtype.size();
        let chunks = op.count.div_ceil(values);
        let divisor = if op.kind == Kind::Mean { ranks as f64 } else { 1.0 };
        let mut sum = vec![0i64; op.count];
        let mut positive = if op.flavour == Flavour::Small { Vec::new() } else { vec![0i64; op.count] };
        let mut encodable = vec![true; chunks];
        let mut words = vec![0u8; 4 * values];
        for rank in 0..ranks {
            let src = source(op, salt, rank, 0, op.count);
            for (c, part) in src.chunks(values * size).enumerate() {
                encodable[c] &= fixed::encode(op.dtype, part, scale, fixed::LIMIT, &mut words).fits;
                let first = c * values;
                let n = part.len() / size;
                for (s, w) in sum[first..first + n].iter_mut().zip(words.as_chunks::<4>().0) {
                    *s += i64::from(i32::from_be_bytes(*w));
                }
                if !positive.is_empty() {
                    for (s, w) in positive[first..first + n].iter_mut().zip(words.as_chunks::<4>().0) {
                        *s += i64::from(i32::from_be_bytes(*w)).max(0);
                    }
                }
            }
        }
        let inside = |v: i64| v > i64::from(i32::MIN) && v < i64::from(i32::MAX);
        let mut rules = Vec::new();
        let mut raw = Vec::new();
        if op.flavour != Flavour::Small {
            for (c, encodable) in encodable.iter().enumerate() {
                let range = c * values..((c + 1) * values).min(op.count);
                let must = !encodable || sum[range.clone()].iter().any(|s| !inside(*s));
                let may = range.clone().any(|i| !inside(positive[i]) || !inside(sum[i] - positive[i]));
                rules.push(if must {
                    Rule::Raw
                } else if may {
                    Rule::Either
                } else {
                    Rule::Fixed
                });
                let mut bytes = Vec::new();
                if must || may {
                    let parts: Vec<Vec<u8>> = (0..ranks)
                        .map(|rank| {
                            let mut out = vec![0u8; 4 * range.len()];
                            fixed::encode_raw(op.dtype, &source(op, salt, rank, range.start, range.end), &mut out);
                            out
                        })
                        .collect();
                    let mut total = vec![0u8; 4 * range.len()];
                    fixed::sum_raw(op.dtype.raw_type(), parts.iter().map(|p| &p[..]), &mut total);
                    bytes.resize(range.len() * size, 0);
                    fixed::decode_raw(op.dtype, &total, divisor, &mut bytes);
                }
                raw.push(bytes);
            }
        }
        let payload: Vec<u8> = sum.iter().flat_map(|s| (*s as i32).to_be_bytes()).collect();
        let mut out = vec![0u8; op.count * size];
        fixed::decode(op.dtype, &payload, scale, divisor, &mut out);
        Self { fixed: out, rules, raw, chunk: values * size }
    }

    /// Compare one rank's result; the first wrong chunk if there is one.
    ///
    /// # Errors
    /// A text that names chunk and element.
    pub fn verify(&mut self, got: &[u8]) -> Result<(), String> {
        if got.len() != self.fixed.len() {
            return Err(format!("{} bytes instead of {}", got.len(), self.fixed.len()));
        }
        if got == &self.fixed[..] && self.rules.iter().all(|r| *r == Rule::Fixed) {
            return Ok(());
        }
        for (c, part) in got.chunks(self.chunk).enumerate() {
            let want = &self.fixed[c * self.chunk..c * self.chunk + part.len()];
            let rule = self.rules.get(c).copied().unwrap_or(Rule::Fixed);
            let fixed_ok = rule != Rule::Raw && part == want;
            let raw_ok = rule != Rule::Fixed && part == &self.raw[c][..];
            if !fixed_ok && !raw_ok {
                let reference = if rule == Rule::Raw { &self.raw[c][..] } else { want };
                let at = part.iter().zip(reference).position(|(a, b)| a != b).unwrap_or(0);
                return Err(format!(
                    "chunk {c} ({rule:?} rule), byte {at}: got {:02x?}, want {:02x?}",
                    &part[at / 4 * 4..(at / 4 * 4 + 4).min(part.len())],
                    &reference[at / 4 * 4..(at / 4 * 4 + 4).min(part.len())]
                ));
            }
            if rule == Rule::Either && fixed_ok != raw_ok {
                self.rules[c] = if raw_ok { Rule::Raw } else { Rule::Fixed };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_found() {
        for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16, Dtype::Int32] {
            for flavour in [Flavour::Small, Flavour::Large, Flavour::Special] {
                let op = OpSpec { count: 1000, dtype, kind: Kind::Sum, flavour };
                let mut e = Expected::new(&op, 7, 3, 62, 1e8);
                let mut good = e.fixed.clone();
                for (c, rule) in e.rules.iter().enumerate() {
                    if *rule == Rule::Raw {
                        let at = c * e.chunk;
                        good[at..at + e.raw[c].len()].copy_from_slice(&e.raw[c]);
                    }
                }
                e.verify(&good).unwrap();
                good[990 * dtype.size()] ^= 1;
                assert!(e.verify(&good).is_err(), "{dtype:?} {flavour:?}");
            }
        }
    }

    #[test]
    fn special_operations_have_raw_chunks() {
        let op = OpSpec { count: 6200, dtype: Dtype::Float32, kind: Kind::Sum, flavour: Flavour::Special };
        let e = Expected::new(&op, 7, 3, 62, 1e8);
        assert!(e.rules.contains(&Rule::Raw) && e.rules.contains(&Rule::Fixed));
    }
}
