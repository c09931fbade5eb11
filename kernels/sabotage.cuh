// A defect to compile in, so that a test can prove that it would notice: -DFRTC_SABOTAGE=last_k_tile
#pragma once

namespace frtc {

enum class Sabotage { none, last_k_tile, neighbour_gate, neighbour_scale, row_tile, last_moment, quarter_moment };
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE none
#endif
inline constexpr Sabotage kSabotage = Sabotage::FRTC_SABOTAGE;

}  // namespace frtc
