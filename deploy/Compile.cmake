# Compile: how every C file of Tandem is compiled; for the whole project and for the tests of another processor (tests/arm).
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_C_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g3")

# The numbers of the CPU engine must not depend on the compiler's mood: no contraction, no fast math.
add_compile_options(-Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith
                    -Wundef -Wformat=2 -Wwrite-strings -Werror -ffp-contract=off -fno-strict-aliasing)
