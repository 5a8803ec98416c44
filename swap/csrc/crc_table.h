// Reflected CRCs of 32 bits by table, eight bytes at a time: the way that every processor can go.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace swap_native {

class CrcTable {
  public:
    explicit CrcTable(std::uint32_t polynomial) {  // reflected
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t value = byte;
            for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? polynomial : 0);
            tables_[0][byte] = value;
        }
        for (std::size_t depth = 1; depth < 8; ++depth)
            for (std::size_t byte = 0; byte < 256; ++byte) {
                const std::uint32_t value = tables_[depth - 1][byte];
                tables_[depth][byte] = (value >> 8) ^ tables_[0][value & 0xFF];
            }
    }

    // The register after `nbytes` more; beginning and end (inverted or not) are the caller's.
    std::uint32_t advance(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) const {
        const auto& t = tables_;
        for (; nbytes >= 8; nbytes -= 8, data += 8) {
            const std::uint32_t value =
                crc ^ (data[0] | data[1] << 8 | data[2] << 16 | static_cast<std::uint32_t>(data[3]) << 24);
            crc = t[7][value & 0xFF] ^ t[6][(value >> 8) & 0xFF] ^ t[5][(value >> 16) & 0xFF] ^ t[4][value >> 24] ^
                  t[3][data[4]] ^ t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
        }
        for (; nbytes; --nbytes, ++data) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 0xFF];
        return crc;
    }

  private:
    std::array<std::array<std::uint32_t, 256>, 8> tables_{};
};

}  // namespace swap_native
