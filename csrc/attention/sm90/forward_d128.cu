#include "csrc/attention/sm90/forward_instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD128 = ForwardInstance<128, 128, 2, BlockWidths{176, 128}, BlockWidths{128, 128}>::kKernel;

}  // namespace jaxmagi::sm90
