#include "simd_avx2.h"
// The body compiles over whichever Simd came before it.
#include "kernels_body.h"

namespace optimizer_cpu {
extern const KernelTable kAvx2Table;
const KernelTable kAvx2Table = make_table("avx2");
}  // namespace optimizer_cpu
