#ifndef SHARDD_COMMON_TENSOR_ISA_H_
#define SHARDD_COMMON_TENSOR_ISA_H_

namespace shardd::tensor {

// The levels of the machine that kernels are compiled for; they give the same bits.
enum class Isa { kBase = 0, kAvx2, kAvx512 };

Isa BestIsa();     // what this machine has
Isa CurrentIsa();  // BestIsa() unless a test lowered it

// Takes effect for calls that begin afterwards, in the whole process; levels above BestIsa() are cut to it.
void SetIsaForTest(Isa isa);

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_ISA_H_
