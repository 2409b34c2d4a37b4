"""A follower: the process of a rank other than 0 of a group, which carries out the leader's orders."""
