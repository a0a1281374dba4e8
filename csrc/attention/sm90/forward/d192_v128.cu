#include "csrc/attention/sm90/forward/instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD192V128 = ForwardInstance<192, 128, 3, 80, 64>::kKernel;

}  // namespace jaxmagi::sm90
