------------------------------- MODULE Commit -------------------------------
(* The commit of a checkpoint, the fence between attempts, and retention: the rules of runner/checkpoint/save.py,
   manifest.py, policy.py, restore.py and runner/attempts/fence.py, over one directory on a disk or in a bucket.

   Each action is one operation on the storage, so that processes of several attempts interleave between any two of
   them. An attempt that is superseded while it is alive goes on as a zombie until a check of the fence ends it.
   Assumptions on the storage are written beside the actions that need them. *)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Processes,    \* processes of each attempt
    LastStep,     \* the job saves every step from 1 to this one
    MaxAttempts,
    MaxFailures,  \* kills, take-overs of a living attempt, power cuts and damaged checkpoints, together
    Keep,         \* checkpoint.keep_last
    IsDisk        \* TRUE for a disk, FALSE for a bucket

VARIABLES
    newest,    \* highest attempt that has claimed the directory
    manifest,  \* by step: nothing, a commit, or (in a bucket) a tombstone
    isFlushed, \* by step: the manifest, or its absence, survives a power cut
    former,    \* by step: what a power cut brings back if the change of the manifest was not flushed
    isMoved,   \* by step (disks): the directory has the name that a retirement gives it
    part,      \* by attempt, step and process: state of the files with the arrays
    pc, step, target, known,  \* by attempt: what process 0 is about to do, and what it knows
    failures,
    damaged,   \* steps whose bytes have changed since they were read back
    promised   \* steps whose commit an attempt has reported, and that it has not deleted itself

vars == <<newest, manifest, isFlushed, former, isMoved, part, pc, step, target, known, failures, damaged, promised>>
store == <<manifest, isFlushed, former, isMoved, part>>

Steps == 1..LastStep
Attempts == 1..MaxAttempts
Ended == {"none", "done", "dead", "fenced", "refused"}
Nothing == [kind |-> "nothing", by |-> 0, contested |-> FALSE]
CommitOf(a, isContested) == [kind |-> "commit", by |-> a, contested |-> isContested]
Tombstone(a) == [kind |-> "tombstone", by |-> a, contested |-> FALSE]
Max(set) == IF set = {} THEN 0 ELSE CHOOSE x \in set : \A y \in set : y <= x

IsCommitted(s) == manifest[s].kind = "commit" /\ ~isMoved[s]
HasFiles(s) == \E a \in Attempts, p \in Processes : part[a][s][p] # "absent"
IsWhole(s) == \A p \in Processes : part[manifest[s].by][s][p] # "absent"
Good == {s \in Steps : IsCommitted(s) /\ IsWhole(s) /\ s \notin damaged}

Init ==
    /\ newest = 0 /\ failures = 0 /\ damaged = {} /\ promised = {}
    /\ manifest = [s \in Steps |-> Nothing] /\ former = manifest
    /\ isFlushed = [s \in Steps |-> TRUE] /\ isMoved = [s \in Steps |-> FALSE]
    /\ part = [a \in Attempts |-> [s \in Steps |-> [p \in Processes |-> "absent"]]]
    /\ pc = [a \in Attempts |-> "none"] /\ step = [a \in Attempts |-> 0]
    /\ target = [a \in Attempts |-> 0] /\ known = [a \in Attempts |-> {}]

Go(a, next) == pc' = [pc EXCEPT ![a] = next]
\* Fence.check: an attempt that is not the newest ends. Assumption: a listing shows every claim made before it.
CheckThen(a, next) == Go(a, IF newest = a THEN next ELSE "fenced")
\* A change of a manifest. In a bucket it is durable at once; on a disk when its directory is flushed.
Put(s, content) ==
    /\ manifest' = [manifest EXCEPT ![s] = content]
    /\ former' = [former EXCEPT ![s] = IF isFlushed[s] THEN manifest[s] ELSE @]
    /\ isFlushed' = [isFlushed EXCEPT ![s] = ~IsDisk]
\* manifest.remove_files: an attempt leaves the files of newer attempts alone.
RemoveFiles(a, s) == part' = [b \in Attempts |->
    IF b > a THEN part[b] ELSE [part[b] EXCEPT ![s] = [p \in Processes |-> "absent"]]]

(* Start of an attempt. *)

\* Fence.claim. Creating the file of a number succeeds once. A take-over of a living attempt counts as a failure.
Claim(a) ==
    /\ pc[a] = "none" /\ newest = a - 1
    /\ IF \E b \in Attempts : b < a /\ pc[b] \notin Ended
       THEN failures < MaxFailures /\ failures' = failures + 1
       ELSE UNCHANGED failures
    /\ \A b \in Attempts : pc[b] \notin {"done", "refused"}
    /\ newest' = a /\ Go(a, "claimed")
    /\ UNCHANGED <<store, step, target, known, damaged, promised>>

\* manifest.finish_retirements: a directory that was renamed while its manifest was created gets its name back.
FinishRetirement(a, s) ==
    /\ pc[a] = "claimed" /\ isMoved[s]
    /\ isMoved' = [isMoved EXCEPT ![s] = FALSE] /\ isFlushed' = [isFlushed EXCEPT ![s] = TRUE]
    /\ IF manifest[s].kind = "commit" THEN UNCHANGED part ELSE RemoveFiles(a, s)
    /\ UNCHANGED <<newest, manifest, former, pc, step, target, known, failures, damaged, promised>>

\* restore.restore_newest: the newest checkpoint that passes all checks; refuse if there are some and none passes.
Restore(a) ==
    /\ pc[a] = "claimed" /\ \A s \in Steps : ~isMoved[s]
    /\ IF Good = {} /\ \E s \in Steps : IsCommitted(s)
       THEN Go(a, "refused") /\ UNCHANGED step
       ELSE Go(a, "restored") /\ step' = [step EXCEPT ![a] = Max(Good)]
    /\ UNCHANGED <<newest, store, target, known, failures, damaged, promised>>

\* restore._set_aside checks the fence before each step that it quarantines or retires.
CheckSetAside(a, s) ==
    /\ pc[a] = "restored" /\ s \notin known[a]
    /\ CheckThen(a, "setting aside") /\ target' = [target EXCEPT ![a] = s]
    /\ UNCHANGED <<newest, store, step, known, failures, damaged, promised>>

\* restore.quarantine of a damaged step; its removal is durable before the next action.
Quarantine(a) ==
    LET s == target[a] IN
    /\ pc[a] = "setting aside" /\ IsCommitted(s) /\ s \in damaged /\ s > step[a]
    /\ manifest' = [manifest EXCEPT ![s] = IF @.contested THEN Tombstone(a) ELSE Nothing]
    /\ former' = [former EXCEPT ![s] = Nothing] /\ isFlushed' = [isFlushed EXCEPT ![s] = TRUE]
    /\ RemoveFiles(a, s) /\ damaged' = damaged \ {s} /\ promised' = promised \ {s}
    /\ Go(a, "restored") /\ known' = [known EXCEPT ![a] = @ \cup {s}]
    /\ UNCHANGED <<newest, isMoved, step, target, failures>>

\* manifest.retire_uncommitted: a step with files and without a commit can never be committed by an earlier attempt.
\* Assumption: renaming a directory (disk), replacing an object of a known version (bucket) is atomic. The look at the
\* manifest before a rename is an action of its own.
Retire(a) ==
    LET s == target[a] IN
    /\ pc[a] = "setting aside" /\ ~(IsCommitted(s) /\ s \in damaged /\ s > step[a])
    /\ IF ~HasFiles(s) /\ manifest[s] = Nothing
       THEN Go(a, "restored") /\ known' = [known EXCEPT ![a] = @ \cup {s}] /\ UNCHANGED store
       ELSE IF IsDisk
       THEN /\ Go(a, IF IsCommitted(s) THEN "restored" ELSE "renaming") /\ UNCHANGED store
            /\ known' = IF IsCommitted(s) THEN [known EXCEPT ![a] = @ \cup {s}] ELSE known
       ELSE IF manifest[s].kind = "commit" \/ (manifest[s].kind = "tombstone" /\ manifest[s].by > a)
       THEN Go(a, "restored") /\ known' = [known EXCEPT ![a] = @ \cup {s}] /\ UNCHANGED store
       ELSE Put(s, Tombstone(a)) /\ Go(a, "removing retired") /\ UNCHANGED <<isMoved, part, known>>
    /\ UNCHANGED <<newest, step, target, failures, damaged, promised>>

Rename(a) ==
    /\ pc[a] = "renaming" /\ isMoved' = [isMoved EXCEPT ![target[a]] = TRUE] /\ Go(a, "renamed")
    /\ UNCHANGED <<newest, manifest, isFlushed, former, part, step, target, known, failures, damaged, promised>>

\* The end of a retirement on a disk, and the deletion of the files after a tombstone.
FinishRetire(a) ==
    LET s == target[a] IN
    /\ pc[a] \in {"renamed", "removing retired"} /\ Go(a, "restored")
    /\ known' = [known EXCEPT ![a] = @ \cup {s}] /\ isMoved' = [isMoved EXCEPT ![s] = FALSE]
    /\ isFlushed' = [isFlushed EXCEPT ![s] = TRUE]  \* no file is deleted before the absence of the manifest is durable
    /\ IF manifest[s].kind = "commit" THEN UNCHANGED part ELSE RemoveFiles(a, s)
    /\ UNCHANGED <<newest, manifest, former, step, target, failures, damaged, promised>>

\* Retention.scan flushes the name of the newest manifest, which a killed attempt may not have flushed.
Scan(a) ==
    /\ pc[a] = "restored" /\ known[a] = Steps
    /\ known' = [known EXCEPT ![a] = {s \in Steps : IsCommitted(s)}]
    /\ isFlushed' = [s \in Steps |-> isFlushed[s] \/ s = Max(known'[a])]
    /\ promised' = promised \cup ({Max(known'[a])} \ {0})
    /\ Go(a, "pruning")
    /\ UNCHANGED <<newest, manifest, former, isMoved, part, step, target, failures, damaged>>

(* A save. *)

Train(a) ==
    /\ pc[a] = "running" /\ step[a] < LastStep
    /\ step' = [step EXCEPT ![a] = @ + 1] /\ Go(a, "saving")
    /\ UNCHANGED <<newest, store, target, known, failures, damaged, promised>>

\* ArrayWriter: every process writes its files, and flushes them. Those of a directory that was renamed are lost.
WritePart(a, p) ==
    /\ pc[a] = "saving" /\ ~isMoved[step[a]] /\ part[a][step[a]][p] \in {"absent", "written"}
    /\ part' = [part EXCEPT ![a][step[a]][p] = IF @ = "absent" /\ IsDisk THEN "written" ELSE "durable"]
    /\ UNCHANGED <<newest, manifest, isFlushed, former, isMoved, pc, step, target, known, failures, damaged, promised>>

\* Checkpointer._commit: all parts are durable and read back; then the fence is checked, as late as possible.
CheckCommit(a) ==
    /\ pc[a] = "saving" /\ \A p \in Processes : part[a][step[a]][p] = "durable"
    /\ CheckThen(a, "committing")
    /\ UNCHANGED <<newest, store, step, target, known, failures, damaged, promised>>

\* manifest.commit. Assumption: a link to a name (disk), a write on condition of a version (bucket) succeeds once. On a
\* disk it needs the directory of the arrays of this attempt.
Commit(a) ==
    LET s == step[a]
        isOwnTombstone == manifest[s] = Tombstone(a)
        hasArrays == ~isMoved[s] /\ \E p \in Processes : part[a][s][p] # "absent"
    IN
    /\ pc[a] = "committing"
    /\ IF (manifest[s] = Nothing \/ isOwnTombstone) /\ (IsDisk => hasArrays)
       THEN Put(s, CommitOf(a, isOwnTombstone)) /\ Go(a, "flushing") /\ UNCHANGED <<isMoved, part>>
       ELSE \* the save has failed: another attempt was first
            /\ Go(a, "running") /\ UNCHANGED <<manifest, isFlushed, former, isMoved>>
            /\ part' = [part EXCEPT ![a][s] = [p \in Processes |-> "absent"]]
    /\ UNCHANGED <<newest, step, target, known, failures, damaged, promised>>

\* The flush of the name fails if the directory was renamed: the attempt is superseded.
FlushCommit(a) ==
    LET s == step[a] IN
    /\ pc[a] = "flushing"
    /\ IF isMoved[s]
       THEN Go(a, "fenced") /\ UNCHANGED <<isFlushed, known, promised>>
       ELSE /\ isFlushed' = [isFlushed EXCEPT ![s] = TRUE]
            \* a newer attempt may have found the step damaged meanwhile
            /\ promised' = promised \cup {t \in {s} : manifest[t] # Nothing}
            /\ known' = [known EXCEPT ![a] = @ \cup {s}] /\ Go(a, "pruning")
    /\ UNCHANGED <<newest, manifest, former, isMoved, part, step, target, failures, damaged>>

(* Retention, after a commit and at a start: policy.delete_step of the oldest step beyond the newest `Keep`. *)

Superfluous(a) == {s \in known[a] : Cardinality({t \in known[a] : t > s}) >= Keep}

CheckDelete(a) ==
    /\ pc[a] = "pruning"
    /\ IF Superfluous(a) = {} THEN Go(a, "running") /\ UNCHANGED target
       ELSE CheckThen(a, "deleting") /\ target' = [target EXCEPT ![a] = CHOOSE s \in Superfluous(a) : TRUE]
    /\ UNCHANGED <<newest, store, step, known, failures, damaged, promised>>

\* manifest.uncommit. Files of an attempt that has not committed them may be those of a zombie, about to commit: on a
\* disk they are deleted first, in a bucket a tombstone takes the place of the manifest.
HasForeignFiles(s) == manifest[s].kind = "commit" /\ \E b \in Attempts \ {manifest[s].by}, p \in Processes : part[b][s][p] # "absent"

DeleteForeignFiles(a) ==
    LET s == target[a] IN
    /\ pc[a] = "deleting" /\ ~isMoved[s] /\ IsDisk /\ HasForeignFiles(s)
    /\ part' = [b \in Attempts |-> IF b > a \/ b = manifest[s].by THEN part[b]
                                  ELSE [part[b] EXCEPT ![s] = [p \in Processes |-> "absent"]]]
    /\ UNCHANGED <<newest, manifest, isFlushed, former, isMoved, pc, step, target, known, failures, damaged, promised>>

DeleteManifest(a) ==
    LET s == target[a] IN
    /\ pc[a] = "deleting" /\ ~isMoved[s]
    /\ IsDisk /\ manifest[s].kind = "commit" =>
        \A b \in 1..a \ {manifest[s].by}, p \in Processes : part[b][s][p] = "absent"
    /\ Put(s, IF manifest[s].kind = "tombstone" THEN manifest[s]
              ELSE IF manifest[s].contested \/ (~IsDisk /\ HasForeignFiles(s)) THEN Tombstone(a) ELSE Nothing)
    /\ promised' = promised \ {s} /\ Go(a, "flushing deletion")
    /\ UNCHANGED <<newest, isMoved, part, step, target, known, failures, damaged>>

FlushDeletion(a) ==
    /\ pc[a] = "flushing deletion" /\ Go(a, "deleting files")
    /\ isFlushed' = [isFlushed EXCEPT ![target[a]] = TRUE]
    /\ UNCHANGED <<newest, manifest, former, isMoved, part, step, target, known, failures, damaged, promised>>

DeleteFiles(a) ==
    /\ pc[a] = "deleting files" /\ Go(a, "pruning") /\ RemoveFiles(a, target[a])
    /\ known' = [known EXCEPT ![a] = @ \ {target[a]}]
    /\ UNCHANGED <<newest, manifest, isFlushed, former, isMoved, step, target, failures, damaged, promised>>

Finish(a) ==
    /\ pc[a] = "running" /\ step[a] = LastStep /\ CheckThen(a, "done")
    /\ UNCHANGED <<newest, store, step, target, known, failures, damaged, promised>>

(* Failures. *)

Kill(a) ==
    /\ pc[a] \notin Ended /\ failures < MaxFailures /\ failures' = failures + 1 /\ Go(a, "dead")
    /\ UNCHANGED <<newest, store, step, target, known, damaged, promised>>

\* All processes die, and what was not flushed is lost, or not: the disk decides for each name.
PowerCut ==
    /\ IsDisk /\ failures < MaxFailures /\ failures' = failures + 1
    /\ pc' = [a \in Attempts |-> IF pc[a] \in Ended THEN pc[a] ELSE "dead"]
    /\ \E lost \in SUBSET {s \in Steps : ~isFlushed[s]} :
        manifest' = [s \in Steps |-> IF s \in lost THEN former[s] ELSE manifest[s]]
    /\ isFlushed' = [s \in Steps |-> TRUE]
    /\ part' = [a \in Attempts |-> [s \in Steps |-> [p \in Processes |->
                   IF part[a][s][p] = "written" THEN "absent" ELSE part[a][s][p]]]]
    /\ UNCHANGED <<newest, former, isMoved, step, target, known, damaged, promised>>

\* Bytes of one checkpoint change, while another one is good. With keep_last 1 there is nothing to fall back to.
Damage(s) ==
    /\ Keep > 1 /\ damaged = {} /\ s \in Good /\ \E t \in Good \ {s} : isFlushed[t]
    /\ failures < MaxFailures
    /\ failures' = failures + 1 /\ damaged' = {s}
    /\ UNCHANGED <<newest, store, pc, step, target, known, promised>>

Advance(a) ==
    \/ Claim(a) \/ Restore(a) \/ Quarantine(a) \/ Retire(a) \/ Rename(a) \/ FinishRetire(a) \/ Scan(a)
    \/ Train(a) \/ CheckCommit(a) \/ Commit(a) \/ FlushCommit(a)
    \/ CheckDelete(a) \/ DeleteForeignFiles(a) \/ DeleteManifest(a) \/ FlushDeletion(a) \/ DeleteFiles(a) \/ Finish(a)
    \/ \E s \in Steps : FinishRetirement(a, s) \/ CheckSetAside(a, s)
    \/ \E p \in Processes : WritePart(a, p)

Next ==
    \/ \E a \in Attempts : Advance(a) \/ Kill(a)
    \/ PowerCut
    \/ \E s \in Steps : Damage(s)

Spec == Init /\ [][Next]_vars /\ \A a \in Attempts : WF_vars(Advance(a))

(* What must hold. *)

\* A manifest names no file that is missing, on a disk even after a power cut at this moment.
ManifestsAreWhole ==
    /\ \A s \in Steps : manifest[s].kind = "commit" => IsWhole(s)
    /\ \A s \in Steps : ~isFlushed[s] /\ former[s].kind = "commit" =>
        \A p \in Processes : part[former[s].by][s][p] = "durable"

\* A commit that was reported, and not deleted by its run since, is there for the next restore, or a newer one is.
PromisesAreKept ==
    \A s \in promised \ damaged : \E t \in Steps :
        t >= s /\ manifest[t].kind = "commit" /\ IsWhole(t) /\ isFlushed[t] /\ t \notin damaged

\* At most the step in progress is lost: an attempt continues from the newest step that was promised.

RestoreIsNewest == [][\A a \in Attempts : pc[a] = "claimed" /\ pc'[a] = "restored" =>
                        \A s \in promised \ damaged : step'[a] >= s]_vars
NeverRefused == \A a \in Attempts : pc[a] # "refused"

\* The job reaches its end, as long as attempts are left.
Ends == <>(\/ \E a \in Attempts : pc[a] = "done"
           \/ pc[MaxAttempts] \in {"dead", "fenced"})

Symmetry == Permutations(Processes)
=============================================================================
