/* Stands in for OpenBLAS in programs that are carried to a machine with a GPU and little else. Only the CPU backend multiplies with it,
 * which runs nothing there; it is right all the same. */
#include <cblas.h>

void openblas_set_num_threads(int n)
{
    (void)n;
}

char *openblas_get_corename(void)
{
    return openblas_get_config();
}

char *openblas_get_config(void)
{
    static char text[] = "no BLAS";
    return text;
}

void cblas_sgemm(OPENBLAS_CONST enum CBLAS_ORDER order, OPENBLAS_CONST enum CBLAS_TRANSPOSE ta, OPENBLAS_CONST enum CBLAS_TRANSPOSE tb,
                 OPENBLAS_CONST blasint m, OPENBLAS_CONST blasint n, OPENBLAS_CONST blasint k, OPENBLAS_CONST float alpha,
                 OPENBLAS_CONST float *a, OPENBLAS_CONST blasint lda, OPENBLAS_CONST float *b, OPENBLAS_CONST blasint ldb,
                 OPENBLAS_CONST float beta, float *c, OPENBLAS_CONST blasint ldc)
{
    (void)order; /* rows throughout */
    for (blasint i = 0; i < m; i++)
        for (blasint j = 0; j < n; j++) {
            double sum = 0;
            for (blasint x = 0; x < k; x++)
                sum += (double)(ta == CblasTrans ? a[x * lda + i] : a[i * lda + x]) * (double)(tb == CblasTrans ? b[j * ldb + x] : b[x * ldb + j]);
            c[i * ldc + j] = (float)((double)alpha * sum) + (beta != 0 ? beta * c[i * ldc + j] : 0);
        }
}
