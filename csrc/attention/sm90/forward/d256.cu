#include "csrc/attention/sm90/forward/instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD256 = ForwardInstance<256, 256, 2, 80, 64>::kKernel;

}  // namespace jaxmagi::sm90
