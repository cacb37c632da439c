/* Between devices and checkpoints: states of all ranks gathered for rank 0 to write, and handed out again to any number of ranks. */
#ifndef QL_SAVE_H
#define QL_SAVE_H

#include "core/ckpt.h"
#include "core/train.h"

/* Every rank calls these; rank 0 writes. path: the new checkpoint's folder. */
ql_status ql_save_checkpoint(ql_worker *w, const char *run, ql_history *h, char path[QL_PATH_MAX]);
/* The finished adapter and trainer_state.json in the run's own folder, and the job where steps were made with it. */
ql_status ql_save_final(ql_worker *w, const char *run, ql_history *h, int trained);
/* Adapters and optimizer state of a checkpoint onto the devices; h continues. */
ql_status ql_save_resume(ql_worker *w, const char *path, ql_history *h);
/* The adapters of the best checkpoint, where load_best_model_at_end asks for them; a warning where it is gone. */
ql_status ql_save_load_best(ql_worker *w, ql_history *h);

#endif
