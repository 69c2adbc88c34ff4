# Latent classes of conditional logits by flexmix; called by glm_choice.py.
#
#   Rscript glm_choice.R FOLDER COLUMNS MOST
#
# FOLDER has train.csv with the columns choice (0 or 1), situation, client and those named in COLUMNS, separated by
# commas. Writes classes.csv: size and coefficients of each class, for the K from 1 to MOST with the smallest BIC.
suppressPackageStartupMessages(library(flexmix))
arguments <- commandArgs(trailingOnly = TRUE)
train <- read.csv(file.path(arguments[1], "train.csv"))
columns <- strsplit(arguments[2], ",")[[1]]
formula <- as.formula(paste("choice ~ 0 +", paste(columns, collapse = " + "), "| client"))
set.seed(1)
start <- proc.time()
found <- suppressMessages(stepFlexmix(
  formula, data = train, model = FLXMRcondlogit(strata = ~situation), k = seq_len(as.integer(arguments[3])), nrep = 3,
  verbose = FALSE
))
fit <- if (is(found, "stepFlexmix")) getModel(found, "BIC") else found
seconds <- sum((proc.time() - start)[c("user.self", "sys.self")])
start <- proc.time()
invisible(flexmix(formula, data = train, model = FLXMRcondlogit(strata = ~situation), k = fit@k))
alone <- sum((proc.time() - start)[c("user.self", "sys.self")])
coefficients <- t(matrix(parameters(fit), length(columns)))
colnames(coefficients) <- columns
write.csv(
  data.frame(size = prior(fit), seconds = seconds, alone = alone, coefficients),
  file.path(arguments[1], "classes.csv"),
  row.names = FALSE
)
