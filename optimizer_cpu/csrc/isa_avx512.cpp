#include "simd_avx512.h"
// The body compiles over whichever Simd came before it.
#include "kernels_body.h"

namespace optimizer_cpu {
extern const KernelTable kAvx512Table;
const KernelTable kAvx512Table = make_table("avx512");
}  // namespace optimizer_cpu
