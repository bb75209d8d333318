/* SPDX-License-Identifier: Apache-2.0 */
/* The fuzzer's entry of one target of native/atp-fuzz; compiled with -DTARGET=<symbol>. */
#include <stddef.h>
#include <stdint.h>

int TARGET(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return TARGET(data, size);
}
