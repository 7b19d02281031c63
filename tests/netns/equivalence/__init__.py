"""Two pods in the same place, each programmed by a back end, and the same connections in both.

Configurations are drawn by seed and number, so that one alone can be drawn again. A pod stands
between three neighbours: the outside behind eth0, a second network behind net1, and a guest behind
vnet0 whose way to everywhere leads through the pod. Servers run in all of them all the time; only
the rules change. Of each connection counts where it ended, or how it failed.

    places          addresses and ports, and what an ending is
    probes          the connections to make
    configurations  the settings, drawn
    known           what is meant to differ, and why
    traveller       sockets in any namespace, as any user
    strays          packets that belong to no connection
    calls           make the connections, read where they ended
    neighbourhood   wires, addresses and routes around a pod
    pods            the servers there, and the process that acts
    comparison      program both pods, call, compare
    report          tell a person what differs, and how to see it again

Each imports from those above it alone.
"""
