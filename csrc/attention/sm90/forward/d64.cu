#include "csrc/attention/sm90/forward/instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD64 = ForwardInstance<64, 64, 3, 128, 96>::kKernel;

}  // namespace jaxmagi::sm90
