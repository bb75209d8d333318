// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets of the transport (tests/fuzz): each takes bytes, drives state machines with them and checks what must
//! always hold. A broken rule is a panic, which ends the process.

mod alloc;
mod assignment;
mod control;
mod input;
mod job;
mod server;
mod setup;
mod switch;
mod worker;

macro_rules! targets {
    ($($symbol:ident => $run:path),* $(,)?) => {
        $(
            /// Called by the fuzzer with one input.
            ///
            /// # Safety
            /// `data` points to `size` readable bytes.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol(data: *const u8, size: usize) -> i32 {
                // SAFETY: the caller's promise; an empty input may come without memory.
                let data = if size == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, size) } };
                $run(data);
                0
            }
        )*
    };
}

targets! {
    atp_fuzz_assignment => assignment::run,
    atp_fuzz_worker => worker::run,
    atp_fuzz_server => server::run,
    atp_fuzz_job => job::run,
    atp_fuzz_control => control::run,
}
