#ifndef SHARDD_COMMON_TENSOR_ISA_H_
#define SHARDD_COMMON_TENSOR_ISA_H_

namespace shardd::tensor {

// Instruction sets that kernels are compiled for; all give the same bits.
enum class Isa { kBase = 0, kAvx2, kAvx512 };

Isa BestIsa();     // of this machine
Isa CurrentIsa();  // BestIsa() unless a test lowered it

// Applies to calls that begin afterwards, in the whole process; levels above BestIsa() become BestIsa().
void SetIsaForTest(Isa isa);

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_ISA_H_
