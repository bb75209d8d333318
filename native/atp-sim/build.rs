// SPDX-License-Identifier: Apache-2.0
//! Compiles the software switch's native data path (softswitch/) into this crate: the very code that the relay runs.

use std::path::Path;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../softswitch");
    let sources = ["control.c", "native.c", "relay.c"].map(|f| root.join("src").join(f));
    let include = root.join("include");
    // The generated wire header names one constant twice, of equal value: -isystem keeps the compiler quiet about it.
    cc::Build::new()
        .files(&sources)
        .flag("-isystem")
        .flag(include.to_str().expect("a path in UTF-8"))
        .std("gnu11")
        .flag("-fno-strict-aliasing")
        .flag("-pthread")
        .opt_level(2)
        .compile("atp_switch_native");
    println!("cargo:rustc-link-lib=pthread");
    for dir in [root.join("src"), include] {
        println!("cargo:rerun-if-changed={}", dir.display());
    }
}
