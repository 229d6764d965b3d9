/* tcp: keeping BBR's measuring out of a prompt.
 *
 * When its minimum round trip is 10 s old, BBR (Linux, version 1) lets next to nothing go for 200 ms and a round trip, to see the path empty. Behind an idle
 * moment it takes the next answer instead, but in the middle of a prompt it stops: the cloud, whose rows do not come, takes the link for broken. So before
 * a prompt, while nothing is on its way, its minimum is made new. The kernel has no call for that but to choose another congestion control and BBR again: window and
 * measured minimum stay, and the bandwidth is measured anew, from the window on, which the link's own pace and limit bound. */
#ifndef TANDEM_PROTOCOL_TCP_H
#define TANDEM_PROTOCOL_TCP_H
#include <stdbool.h>
#include <stdint.h>

#define TCP_RENEW_SLACK_US 1000u /* machines are late by so much */

/* False: this is no TCP of BBR's, or its path has become longer, and nothing was done; or the kernel does not allow it. */
bool tcp_renew(int fd);
/* BBR begins with the shortest round trip of the last five minutes, and lets twice what goes in that be on its way. Where the path is longer than twice that by
 * now, as rtt_us, a mean of the last ones, tells, it is to find out as ever. */
bool tcp_may_renew(uint32_t rtt_us, uint32_t min_rtt_us);

#endif
