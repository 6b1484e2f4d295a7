"""CPU kernels, compiled by LLVM for the machine that they run on. Only this folder imports llvmlite."""
