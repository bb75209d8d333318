// SPDX-License-Identifier: Apache-2.0
//! ATP simulator: the Rust transport (`atp-proto`) and the C switch core (softswitch/) themselves, on a network in virtual
//! time. A run is a function of its seed. See docs/simulator.md.

pub mod check;
pub mod comparison;
pub mod flow;
pub mod net;
pub mod rng;
pub mod scenario;
pub mod schedule;
pub mod sim;
pub mod trace;
