"""GPU kernels and their launches. Only this folder imports triton."""
