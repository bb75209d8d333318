// SPDX-License-Identifier: Apache-2.0
//! The figures.

/// Names and descriptions.
pub const SCENARIOS: [(&str, &str); 0] = [];
