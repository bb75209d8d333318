// SPDX-License-Identifier: Apache-2.0
//! Compiles the software switch's native data path (softswitch/) into this crate: the very code that the relay runs.

use std::path::Path;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../softswitch");
    // src/ itself, without its folder src/kernel: all that needs no libbpf.
    let mut sources: Vec<_> = std::fs::read_dir(root.join("src"))
        .expect("the sources of the software switch")
        .map(|entry| entry.expect("an entry of softswitch/src").path())
        .filter(|path| path.extension().is_some_and(|end| end == "c"))
        .collect();
    sources.sort();
    cc::Build::new()
        .files(&sources)
        .include(root.join("include"))
        .include(&root)
        .std("gnu11")
        .flag("-fno-strict-aliasing")
        .flag("-pthread")
        .opt_level(2)
        .compile("atp_switch_native");
    println!("cargo:rustc-link-lib=pthread");
    for dir in ["include", "core", "src"] {
        println!("cargo:rerun-if-changed={}", root.join(dir).display());
    }
}
