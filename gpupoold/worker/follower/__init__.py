"""A follower: the process of a rank other than 0, which carries out the leader's orders."""
